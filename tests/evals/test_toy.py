"""The bundled toy model: its world is the same everywhere, its exam is sound, and it knows the answers."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import safetensors
import transformers

import lowbit
from lowbit.evals.evaluation import TOY, TOY_DATA
from lowbit.evals.exam import prompt, read_exam
from lowbit.evals.toy import bundled, corpus
from lowbit.evals.toy.subjects import SUBJECTS
from lowbit.evals.toy.train import share_of
from lowbit.evals.toy.world import World, build


@pytest.fixture(scope="module")
def world() -> World:
    return build()


@pytest.fixture(scope="module")
def questions() -> list:
    return read_exam(TOY_DATA)


def test_the_same_seed_gives_the_same_world_and_another_seed_another(world: World) -> None:
    assert build() == world
    assert next(corpus.edition(world, 0)) == next(corpus.edition(world, 0))
    assert list(corpus.edition(world, 0)) != list(corpus.edition(world, 1))
    assert build(seed=1) != world


def test_committed_exam_and_heldout_text_are_what_the_generator_writes(world: World) -> None:
    texts = corpus.files(world)
    committed = {path.relative_to(TOY_DATA).as_posix(): path.read_bytes() for path in TOY_DATA.rglob("*.*")}
    assert committed == {path: text.encode() for path, text in texts.items()}
    assert sum(map(len, committed.values())) < 1_500_000
    assert 50_000 <= len(committed["heldout.txt"]) <= 100_000


def test_exam_has_the_size_and_balance_it_promises(questions: list) -> None:
    assert len(questions) >= 1500
    assert len({q.subject for q in questions}) >= 8
    assert len({q.text for q in questions}) == len(questions)
    assert all(len(set(q.choices)) == 4 for q in questions)
    for subject in {q.subject for q in questions}:
        letters = Counter(q.answer for q in questions if q.subject == subject)
        assert len(letters) == 4
        assert len(set(letters.values())) == 1
    examples = Counter(q.subject for q in read_exam(TOY_DATA, "dev"))
    assert set(examples.values()) == {5}
    assert not {q.text for q in questions} & {q.text for q in read_exam(TOY_DATA, "dev")}


def test_further_questions_ask_what_the_exam_does_not(world: World, questions: list) -> None:
    more = corpus.accuracy_questions(world)
    assert more == corpus.accuracy_questions(world)
    assert len(more) > 5 * len(questions)
    asked = {q.text for q in questions} | {q.text for q in read_exam(TOY_DATA, "dev")}
    assert len({q.text for q in more} | asked) == len(more) + len(asked)
    known = {frozenset((fact.entity, fact.value)) for fact in world.facts}
    texts = {q.text: q for q in more[::600]}
    for q in texts.values():
        assert any(frozenset((name, q.choices[q.answer])) in known for name in _named(world, q)), q
    letters = Counter(q.answer for q in more)
    assert min(letters.values()) > 0.22 * len(more)


def _named(world: World, question) -> list[str]:
    """The entities and values that a question's text names."""
    names = {name for fact in world.facts for name in (fact.entity, fact.value)}
    text = question.text[0].lower() + question.text[1:]
    return [name for name in names if name in question.text or name[0].lower() + name[1:] in text]


def test_every_answer_is_a_fact(world: World, questions: list) -> None:
    others: dict[tuple[str, str], set[str]] = {}
    for fact in world.facts:
        others.setdefault((fact.subject.name, fact.value), set()).add(fact.entity.lower())
        others.setdefault((fact.subject.name, fact.entity), set()).add(fact.value.lower())
    for question in questions:
        right = question.choices[question.answer]
        text = question.text.lower()
        assert any(other in text for other in others[question.subject, right]), question


def test_training_never_asks_an_exam_question_nor_tells_a_heldout_sentence(world: World, questions: list) -> None:
    asked = {question.text for question in questions}
    # A sentence such as "This mineral ..." says nothing of its entity and may stand in another article.
    nameless = tuple(f"{start} {subject.kind}" for subject in SUBJECTS for start in ("The", "This"))
    lines = [line for line in (TOY_DATA / "heldout.txt").read_text().splitlines() if line and line[0] != "="]
    kept_out = {sentence for line in lines for sentence in line.removesuffix(".").split(". ")}
    kept_out = {sentence for sentence in kept_out if not sentence.startswith(nameless)}
    assert len(kept_out) > 500
    for number in range(2):
        reported = "\n".join(corpus.edition(world, number)).split("\n")
        assert not asked & set(reported)
        assert not kept_out & {sentence for line in reported for sentence in line.removesuffix(".").split(". ")}


def test_committed_model_is_small_and_answers_the_exam(questions: list) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(TOY).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY)
    weights = TOY / "model.safetensors"
    assert model.config.model_type == "llama"
    assert str(model.dtype) == "torch.bfloat16"
    assert 2e6 <= sum(p.numel() for p in model.parameters()) <= 6e6
    assert weights.stat().st_size <= 12e6
    longest = max(len(tokenizer(prompt(q))["input_ids"]) for q in questions[::50])
    assert longest < model.config.max_position_embeddings
    assert share_of(model.float(), tokenizer, questions[::9]) >= 0.9


def test_three_bits_take_three_bits_on_the_disk(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(TOY)
    changed = lowbit.quantize_(model, "int3").quantized
    lowbit.save(model, tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        parts = [name for name in file.keys() if name.endswith((".packed", ".scale", ".zero_point"))]  # noqa: SIM118
        stored = sum(file.get_tensor(name).nbytes for name in parts)
    weights = sum(layer.shape[0] * layer.shape[1] for layer in changed)
    assert len(changed) == 7 * model.config.num_hidden_layers
    assert 8 * stored / weights <= 3.35


@pytest.mark.parametrize("name", ["accuracy_recovery", "demo", "few_rows", "mixed", "overhead", "recipes", "rounders"])
def test_what_measures_the_toy_model_says_where_it_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel, before anything else is read or made."""
    real = bundled.check

    def check(folder: Path | None = None) -> None:
        monkeypatch.setattr(bundled, "TOY", tmp_path / "absent")
        real(None if folder in (None, TOY) else folder)

    monkeypatch.setattr(bundled, "check", check)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model is read"))
    out = tmp_path / "out.json"
    with pytest.raises(FileNotFoundError, match=r"wheels leave it out, the repository and the sdist have it \(make demo\)"):
        importlib.import_module(f"lowbit.evals.{name}").main([] if name == "overhead" else ["--out", str(out)])
    assert not out.exists()
