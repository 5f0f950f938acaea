"""What measures a model: exam tables and answers, perplexity, decoding speed."""

from __future__ import annotations

import copy
import csv
import math
import string
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowbit.evals import evaluation
from lowbit.evals.exam import LETTERS, Answers, ExamError, Question, prompt, read_exam, sample, take_exam
from lowbit.evals.generation import decode_speed
from lowbit.evals.perplexity import perplexity


class LetterTokenizer:
    """A token for each printable character, and one for each answer."""

    def __init__(self) -> None:
        self.ids = {token: i for i, token in enumerate([*string.printable, " A", " B", " C", " D"])}

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [self.ids[text]] if text in self.ids else [self.ids[letter] for letter in text]}

    def __len__(self) -> int:
        return len(self.ids)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=104, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


QUESTION = Question("old_maps", "Which?", ("one", "two, or three", 'a "quoted" one', "four\nlines"), 2)


def write_exam(folder: Path, rows: list[list[str]], split: str = "test", subject: str = "old_maps") -> Path:
    path = folder / split / f"{subject}_{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows(rows)
    return path


def rows_of(questions: list[Question]) -> list[list[str]]:
    return [[q.text, *q.choices, LETTERS[q.answer]] for q in questions]


# ---- the exam's tables -----------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=' ",'), min_size=1).filter(str.strip)


@given(st.lists(st.builds(Question, st.just("old_maps"), WORDS, st.tuples(*4 * [WORDS]), st.integers(0, 3)), min_size=1))
@settings(max_examples=30, deadline=None)
def test_an_exam_reads_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, questions: list[Question]) -> None:
    folder = tmp_path_factory.mktemp("exam")
    write_exam(folder, rows_of(questions))
    assert read_exam(folder) == questions


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["Which?", "a", "b", "c", "A"], "got 5 fields"),
        (["Which?", "a", "b", "c", "d", "E"], "got 'E'"),
        (["Which?", "a", "b", "c", "d", ""], "got ''"),
        (["Which?", "a", "b", "c", "d", "AB"], "got 'AB'"),
        (["  ", "a", "b", "c", "d", "A"], "question is empty"),
    ],
)
def test_a_bad_row_is_named_with_its_file(tmp_path: Path, row: list[str], words: str) -> None:
    path = write_exam(tmp_path, [*rows_of([QUESTION]), row])
    with pytest.raises(ExamError, match=words) as caught:
        read_exam(tmp_path)
    assert f"{path}, row 2: " in str(caught.value)


def test_tables_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ExamError, match=r"holds no test/SUBJECT_test\.csv"):
        read_exam(tmp_path)
    path = write_exam(tmp_path, [])
    with pytest.raises(ExamError, match="holds no questions"):
        read_exam(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ExamError, match=r"row 1: .*codec"):
        read_exam(tmp_path)
    path.write_text('"open', encoding="utf-8")
    with pytest.raises(ExamError, match="row 1: "):
        read_exam(tmp_path)


def test_a_sample_is_the_same_in_any_order_and_grows() -> None:
    questions = [Question(subject, f"{i}?", ("a", "b", "c", "d"), i % 4) for i in range(20) for subject in ("x", "y")]
    few, more = sample(questions, 3), sample(questions, 7)
    assert [q.subject for q in few].count("x") == [q.subject for q in few].count("y") == 3
    assert set(few) <= set(more)
    assert set(sample(questions[::-1], 3)) == set(few)
    assert few == [q for q in questions if q in set(few)]
    assert sample(questions, None) == sample(questions, 100) == questions
    with pytest.raises(ValueError, match="at least 1"):
        sample(questions, 0)


def test_the_prompt() -> None:
    question = Question("old_maps", "Which?", ("one", "two", "three", "four"), 1)
    asked = "Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    heading = "The following are multiple choice questions (with answers) about old maps.\n\n"
    assert prompt(question) == heading + asked
    assert prompt(question, [question]) == f"{heading}{asked} B\n\n{asked}"


# ---- answers ---------------------------------------------------------------------------------------------------------


def some_questions(n: int) -> list[Question]:
    rng = np.random.default_rng(0)
    return [
        Question("x", "w" * int(rng.integers(1, 90)) + "?", ("a", "bb" * int(rng.integers(0, 9)), "c", "d"), int(rng.integers(4)))
        for _ in range(n)
    ]


def one_at_a_time(model: nn.Module, questions: list[Question]) -> tuple[int, ...]:
    tokenizer = LetterTokenizer()
    letters = [tokenizer.ids[f" {letter}"] for letter in LETTERS]
    with torch.no_grad():
        logits = [model(torch.tensor([tokenizer(prompt(q))["input_ids"]])).logits[0, -1, letters] for q in questions]
    return tuple(int(four.argmax()) for four in logits)


def test_padding_changes_no_answer(model: nn.Module) -> None:
    questions = some_questions(40)
    answers = take_exam(model, LetterTokenizer(), questions)
    assert answers.picked == one_at_a_time(model, questions)
    assert len(set(answers.picked)) > 1
    assert answers.accuracy == sum(p == q.answer for p, q in zip(answers.picked, questions, strict=True)) / 40
    assert answers.shortened == 0


def test_a_model_that_cannot_spare_logits(model: nn.Module) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.config = model, model.config

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> object:
            return self.inner(input_ids, attention_mask=attention_mask)

    questions = some_questions(9)
    assert take_exam(Plain(), LetterTokenizer(), questions).picked == one_at_a_time(model, questions)


def test_examples_are_dropped_where_the_context_ends(model: nn.Module) -> None:
    questions = some_questions(4)
    answers = take_exam(model, LetterTokenizer(), questions, examples={"x": some_questions(5)})
    assert answers.shortened == 4
    long = Question("x", "w" * 500, ("a", "b", "c", "d"), 0)
    assert take_exam(model, LetterTokenizer(), [long]).shortened == 1


def test_answers_must_be_single_tokens(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="splits into 2 tokens"):
        take_exam(model, lambda text, **_: {"input_ids": [1, 2]}, some_questions(1))
    with pytest.raises(ValueError, match="at least one question"):
        take_exam(model, LetterTokenizer(), [])


def test_right_and_wrong_answers() -> None:
    answers = Answers((QUESTION, QUESTION), (2, 0))
    assert answers.right == (True, False)
    assert answers.accuracy == 0.5


# ---- perplexity and speed --------------------------------------------------------------------------------------------

TEXT = "".join(chr(ord("a") + (i * i + i // 7) % 26) for i in range(700))


def direct_loss(model: nn.Module, ids: list[int], context: int) -> tuple[float, int]:
    """Token by token, each from those before it in its chunk, in float64."""
    losses = []
    for start in range(0, len(ids) - context + 1, context):
        chunk = ids[start : start + context]
        for i in range(1, context):
            logits = model(torch.tensor([chunk[:i]])).logits[0, -1].double()
            losses.append(float(torch.logsumexp(logits, 0) - logits[chunk[i]]))
    return math.fsum(losses) / len(losses), len(losses)


def test_perplexity_is_the_direct_computation(model: nn.Module) -> None:
    tokenizer, seen = LetterTokenizer(), []
    found = perplexity(model, tokenizer, TEXT, context=48, progress=lambda done, total: seen.append((done, total)))
    with torch.no_grad():
        loss, tokens = direct_loss(model, tokenizer(TEXT)["input_ids"], 48)
    assert (found.tokens, found.chunks) == (tokens, 14)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.value == pytest.approx(math.exp(loss), rel=1e-4)
    assert seen[-1] == (14, 14)
    assert perplexity(model, tokenizer, TEXT, context=48, limit=1).tokens == 47


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 1}, "at least 2"),
        ({"context": 257}, "at most the model's 256"),
        ({"context": 48, "limit": 0}, "at least 1 chunk"),
    ],
)
def test_perplexity_refuses(model: nn.Module, options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        perplexity(model, LetterTokenizer(), TEXT, **options)
    with pytest.raises(ValueError, match="has 3 tokens, fewer than one chunk of 256"):
        perplexity(model, LetterTokenizer(), "abc")


def test_decoding_is_timed(model: nn.Module) -> None:
    speed = decode_speed(model, prompt=4, steps=5, repeats=2)
    assert speed.steps == 10
    assert speed.tokens_per_second > 0
    assert speed.first_token > 0
    with pytest.raises(ValueError, match="together at most 256"):
        decode_speed(model, prompt=200, steps=57)


# ---- comparing -------------------------------------------------------------------------------------------------------


def test_models_are_compared_on_the_same_material(model: nn.Module) -> None:
    material = evaluation.Material(TEXT, tuple(some_questions(12)), context=64, chunks=3)
    steps: list[str] = []
    outcomes = list(
        evaluation.compare(
            lambda: copy.deepcopy(model), LetterTokenizer(), ["int8", "int2_g32"], material,
            files=True, progress=lambda what, done, total: steps.append(what),
        )
    )  # fmt: skip
    plain, int8, int2 = outcomes
    assert [o.recipe for o in outcomes] == ["float", "int8", "int2_g32"]
    assert plain.bits_per_weight == 32
    assert plain.difference is None
    assert plain.kernels == {"decode": {}, "prompt": {}}
    assert int8.bits_per_weight > 8 > int2.bits_per_weight > 2
    assert plain.file_bytes > int8.file_bytes > int2.file_bytes
    assert abs(int8.perplexity.loss - plain.perplexity.loss) < abs(int2.perplexity.loss - plain.perplexity.loss)
    assert int2.difference.n == 12
    assert int2.difference.difference == pytest.approx(int2.answers.accuracy - plain.answers.accuracy)
    assert sum(int8.kernels["decode"].values()) == sum(int8.kernels["prompt"].values()) == 14
    assert "int8: perplexity" in steps
    assert int8.to_dict()["exam"]["difference"]["n"] == 12


def test_material_that_cannot_be_read(tmp_path: Path) -> None:
    write_exam(tmp_path, rows_of([QUESTION]))
    with pytest.raises(ValueError, match=r"absent\.txt cannot be read: No such file"):
        evaluation.Material.read(tmp_path, tmp_path / "absent.txt")
    with pytest.raises(ExamError, match=r"dev/SUBJECT_dev\.csv"):
        evaluation.Material.read(tmp_path, tmp_path / "absent.txt", shots=2)
    with pytest.raises(ValueError, match=r"0\.\.5"):
        evaluation.Material.read(tmp_path, shots=6)
