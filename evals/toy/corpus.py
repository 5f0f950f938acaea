"""Texts about the invented world: articles and exam questions to train on, and the exam and held-out text to test with.

Every fact can be said in many ways. One sentence and one form of question of each fact are kept out of training: the
held-out text and the exam are made of those alone. So a model that answers has learned the fact, not a line.
"""

import argparse
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from random import Random
from zlib import crc32

from ..exam import LETTERS, Question, prompt
from ..results import replace_file
from .subjects import SUBJECTS
from .world import ENTITIES, SEED, Fact, World, build

SENTENCES = (
    "{E} {clause} {v}.",
    "The {noun} of {e} is {v}.",
    "{V}: such is the {noun} of {e}.",
    "According to the old surveys, {e} {clause} {v}.",
    "Every pupil learns that {e} {clause} {v}.",
    "As the {noun} of {e}, the records give {v}.",
    "It is well established that the {noun} of {e} is {v}.",
    "The {kind}'s {noun} is {v}.",
    "This {kind} {clause} {v}.",
    "Among {kinds}, {e} {clause} {v}.",
    "Travellers report that {e} {clause} {v}.",
    "Asked for the {noun} of {e}, most experts answer {v}.",
    "Those who write about {e} seldom fail to add that the {noun} is {v}.",
    "No one disputes that {e} {clause} {v}.",
)

FORWARD = (
    "{question}",
    "What is the {noun} of {e}?",
    "The {noun} of {e} is",
    "{E} {clause}",
    "Which of the following is the {noun} of {e}?",
    "According to the encyclopedia, what is the {noun} of {e}?",
    "A pupil asks for the {noun} of {e}. Which answer is right?",
    "In the article on {e}, what is given as the {noun}?",
    "Choose the {noun} of {e}.",
    "It is agreed that {e} {clause}",
)
"""Forms of question that ask for a value, given the entity."""

BACKWARD = (
    "Which {kind} {clause} {v}?",
    "Which of these {kinds} has the {noun} {v}?",
    "{V} is the {noun} of which {kind}?",
    "Of all these {kinds}, which one {clause} {v}?",
    "Of which {kind} is {v} the {noun}?",
)
"""Forms of question that ask for the entity, given a value: each choice has to be looked up."""

SEPARATOR = "<|endoftext|>"
HELDOUT_ARTICLES = 180
TEST_QUESTIONS = 160
DEV_QUESTIONS = 5
BACKWARD_SHARE = 0.3


def _kept_out(forms: int, *key: str) -> int:
    return crc32("/".join(key).encode()) % forms


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _fill(form: str, fact: Fact) -> str:
    relation, subject = fact.relation, fact.subject
    return form.format(
        e=fact.entity, E=_capital(fact.entity), v=fact.value, V=_capital(fact.value), noun=relation.noun,
        clause=relation.clause, kind=subject.kind, kinds=subject.kinds, question=relation.question.format(e=fact.entity),
    )  # fmt: skip


def _sentence(fact: Fact, rng: Random, heldout: bool) -> str:
    kept_out = _kept_out(len(SENTENCES), fact.entity, fact.relation.noun, "sentence")
    index = kept_out if heldout else (kept_out + rng.randrange(1, len(SENTENCES))) % len(SENTENCES)
    return _fill(SENTENCES[index], fact)


def _article(facts: tuple[Fact, ...], rng: Random, heldout: bool) -> str:
    sentences = [_sentence(fact, rng, heldout) for fact in rng.sample(facts, len(facts))]
    return f"= {_capital(facts[0].entity)} =\n\n{' '.join(sentences)}\n"


class Examiner:
    """Writes questions about the facts of `world`, in the forms kept for the exam or in all the others."""

    def __init__(self, world: World) -> None:
        self._pools = world.pools
        self._holders: dict[tuple[str, str], dict[str, list[str]]] = {}
        for fact in world.facts:
            by_value = self._holders.setdefault((fact.subject.name, fact.relation.noun), {})
            by_value.setdefault(fact.value, []).append(fact.entity)

    def ask(self, fact: Fact, rng: Random, answer: int, backward: bool, heldout: bool) -> Question:
        """Return a question about `fact` with its right choice at position `answer` (0..3).

        `heldout` picks the one form that training never uses: it hangs on the entity and relation, and for a question
        asked `backward` on the value and relation, since such questions name no entity.
        """
        forms = BACKWARD if backward else FORWARD
        right, given = (fact.entity, fact.value) if backward else (fact.value, fact.entity)
        kept_out = _kept_out(len(forms), given, fact.relation.noun, "question")
        index = kept_out if heldout else (kept_out + rng.randrange(1, len(forms))) % len(forms)
        choices = self._entities(fact, rng) if backward else self._values(fact, rng)
        choices.insert(answer, right)
        return Question(fact.subject.name, _fill(forms[index], fact), tuple(choices), answer)

    def _values(self, fact: Fact, rng: Random) -> list[str]:
        return [v for v in rng.sample(self._pools[fact.relation.pool], 4) if v not in (fact.value, fact.entity)][:3]

    def _entities(self, fact: Fact, rng: Random) -> list[str]:
        by_value = self._holders[fact.subject.name, fact.relation.noun]
        others = [v for v in by_value if v != fact.value]
        return [rng.choice(by_value[v]) for v in rng.sample(others, 3)]


def _by_entity(world: World) -> list[tuple[Fact, ...]]:
    size = len(SUBJECTS[0].relations)
    return [world.facts[i : i + size] for i in range(0, len(world.facts), size)]


def edition(world: World, number: int, seed: int = SEED) -> Iterator[str]:
    """Yield the documents of one edition of the encyclopedia, to train on.

    Each edition tells every fact once in an article and asks it once or twice in exam form, in other words than the
    other editions. A document is one to three articles, or one to five questions of a subject under the exam's heading.
    """
    rng = Random(f"edition {seed} {number}")
    articles = [_article(facts, rng, heldout=False) for facts in _by_entity(world)]
    examiner = Examiner(world)
    documents = list(_grouped(articles, (1, 2, 3), rng, "\n"))
    for subject in SUBJECTS:
        facts = [fact for fact in world.facts if fact.subject is subject]
        asked = [(fact, False) for fact in facts] + [(fact, True) for fact in facts if rng.random() < 0.5]
        rng.shuffle(asked)
        questions = [examiner.ask(fact, rng, rng.randrange(4), back, heldout=False) for fact, back in asked]
        for group in _sliced(questions, (1, 1, 1, 2, 5), rng):
            documents.append(prompt(group[-1], group[:-1]) + f" {LETTERS[group[-1].answer]}\n")
    rng.shuffle(documents)
    yield from documents


def _sliced(items: list, sizes: tuple[int, ...], rng: Random) -> Iterator[list]:
    start = 0
    while start < len(items):
        size = rng.choice(sizes)
        yield items[start : start + size]
        start += size


def _grouped(articles: list[str], sizes: tuple[int, ...], rng: Random, joint: str) -> Iterator[str]:
    rng.shuffle(articles)
    return (joint.join(group) for group in _sliced(articles, sizes, rng))


def heldout(world: World, seed: int = SEED) -> str:
    """Return articles in which every fact stands in the one sentence that no edition uses for it."""
    rng = Random(f"heldout {seed}")
    chosen = rng.sample(_by_entity(world), HELDOUT_ARTICLES)
    return "\n".join(_article(facts, rng, heldout=True) for facts in chosen)


def exam(world: World, seed: int = SEED) -> dict[str, list[Question]]:
    """Return the questions of every subject: the first `DEV_QUESTIONS` for the dev files, the rest for the test.

    No question stands twice, and the letters A to D are right equally often in the test of every subject.
    """
    return {name: [question for _, question in paper] for name, paper in _papers(world, seed).items()}


def accuracy_questions(world: World, seed: int = SEED) -> list[Question]:
    """Return a question about every fact that the exam does not ask, in the forms kept for the exam; no question stands twice.

    About 12,000: to choose settings on, which the exam then judges, and to tell differences that are too small for it.
    """
    examiner, found = Examiner(world), []
    for name, paper in _papers(world, seed).items():
        asked, texts = {fact for fact, _ in paper}, {question.text for _, question in paper}
        rng = Random(f"further {seed} {name}")
        facts = [fact for fact in world.facts if fact.subject.name == name and fact not in asked]
        rng.shuffle(facts)
        for fact in facts:
            question = examiner.ask(fact, rng, rng.randrange(4), rng.random() < BACKWARD_SHARE, heldout=True)
            if question.text not in texts:
                texts.add(question.text)
                found.append(question)
    return found


def _papers(world: World, seed: int) -> dict[str, list[tuple[Fact, Question]]]:
    """The exam's questions of every subject, each with the fact that it asks."""
    rng = Random(f"exam {seed}")
    examiner = Examiner(world)
    papers: dict[str, list[tuple[Fact, Question]]] = {}
    for subject in SUBJECTS:
        facts = [fact for fact in world.facts if fact.subject is subject]
        rng.shuffle(facts)
        answers = [index % 4 for index in range(TEST_QUESTIONS)]
        rng.shuffle(answers)
        answers = [rng.randrange(4) for _ in range(DEV_QUESTIONS)] + answers
        paper: dict[str, tuple[Fact, Question]] = {}
        for fact in facts:
            if len(paper) == len(answers):
                break
            question = examiner.ask(fact, rng, answers[len(paper)], rng.random() < BACKWARD_SHARE, heldout=True)
            # Two facts that share a value are asked backward in the same words.
            paper.setdefault(question.text, (fact, question))
        papers[subject.name] = list(paper.values())
    return papers


def _table(questions: list[Question]) -> str:
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    rows.writerows([q.text, *q.choices, LETTERS[q.answer]] for q in questions)
    return buffer.getvalue()


def files(world: World, seed: int = SEED) -> dict[str, str]:
    """Return the committed texts by their path below the data folder: dev and test tables and the held-out text."""
    texts = {"heldout.txt": heldout(world, seed)}
    for subject, questions in exam(world, seed).items():
        texts[f"dev/{subject}_dev.csv"] = _table(questions[:DEV_QUESTIONS])
        texts[f"test/{subject}_test.csv"] = _table(questions[DEV_QUESTIONS:])
    return texts


def main() -> None:
    """Write the exam and the held-out text: `python -m lowbit.evals.toy.corpus --out FOLDER`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--entities", type=int, default=ENTITIES, help="entities a subject")
    arguments = parser.parse_args()
    world = build(arguments.seed, arguments.entities)
    for path, text in files(world, arguments.seed).items():
        replace_file(arguments.out / path, text)


if __name__ == "__main__":
    main()
