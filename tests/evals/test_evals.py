"""What measures a model: exam tables and answers, perplexity, decoding speed."""

from __future__ import annotations

import csv
import json
import math
import string
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowbit.evals import demo, evaluation, overhead, tables
from lowbit.evals.exam import LETTERS, ExamError, Question, prompt, read_exam
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
    path.write_text("x" * (17 << 20), encoding="utf-8")
    with pytest.raises(ExamError, match="row 1: a line is longer than 16 MiB"):
        read_exam(tmp_path)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_rows_with_names(tmp_path: Path, ending: str) -> None:
    rows = [{"question": QUESTION.text, "choices": [*QUESTION.choices], "answer": QUESTION.answer}]
    path = write_rows(tmp_path / "test" / f"old_maps_test{ending}", rows)
    assert read_exam(tmp_path) == [QUESTION]
    write_rows(path, [*rows, {**rows[0], "choices": ["a", "b", "c"]}])
    with pytest.raises(ExamError, match=r"row 2: .*got 5 fields") as caught:
        read_exam(tmp_path)
    assert str(path) in str(caught.value)
    write_rows(path, [{"question": "Which?", "choices": ["a", "b", "c", "d"]}])
    with pytest.raises(ExamError, match="row 1: the field 'answer' is missing"):
        read_exam(tmp_path)
    path.write_bytes(b"{\n")
    with pytest.raises(ExamError, match=str(path)):
        read_exam(tmp_path)


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_the_prompt() -> None:
    question = Question("old_maps", "Which?", ("one", "two", "three", "four"), 1)
    asked = "Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    heading = "The following are multiple choice questions (with answers) about old maps.\n\n"
    assert prompt(question) == heading + asked
    assert prompt(question, [question]) == f"{heading}{asked} B\n\n{asked}"


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


@given(st.integers(2, 40), st.integers(1, 40))
@settings(max_examples=12, deadline=None)
def test_a_stride_predicts_every_token_once(model: nn.Module, context: int, stride: int) -> None:
    tokenizer, stride = LetterTokenizer(), min(stride, context)
    text = TEXT[: context + 6 * stride]
    found = perplexity(model, tokenizer, text, context=context, stride=stride)
    losses, end = [], 1
    with torch.no_grad():
        for start in range(0, len(text) - context + 1, stride):
            ids = torch.tensor(tokenizer(text[start : start + context])["input_ids"])
            each = nn.functional.cross_entropy(model(ids[None]).logits[0, :-1].double(), ids[1:], reduction="none")
            losses += each[max(end - start, 1) - 1 :].tolist()
            end = start + context
    assert (found.tokens, found.stride) == (len(losses), stride)
    assert found.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    if stride < context:
        assert found.tokens == len(text) - 1
    else:
        assert found == perplexity(model, tokenizer, text, context=context)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 48, "stride": 49}, "1 to the context's 48"),
        ({"context": 48, "stride": 0}, "1 to the context's 48"),
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


# ---- figures of the bundled toy model ---------------------------------------------------------------------------------


def test_the_demo_keeps_what_its_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = demo.run

    def short(limit: int) -> list[evaluation.Outcome]:
        return measured(limit=limit, recipes=["int4"])

    text = tmp_path / "text.txt"
    text.write_text(evaluation.TOY_TEXT.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    monkeypatch.setattr(evaluation.Material.read, "__defaults__", (evaluation.TOY_DATA, text))
    monkeypatch.setattr(demo, "run", short)
    demo.main(["--limit", "1", "--out", str(tmp_path / "demo.json")])
    kept = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert kept["limit"] == 1
    assert {"date", "versions", "cpu"} <= set(kept)
    assert [outcome["recipe"] for outcome in kept["outcomes"]] == ["float", "int4"]
    assert set(kept["outcomes"][1]["tasks"]["mmlu"]) == {"n", "value", "difference"}
    head, rule, plain, int4 = tables.demo_table([kept]).splitlines()
    assert head.count("|") == rule.count("|") == plain.count("|") == int4.count("|")
    assert f"{kept['outcomes'][1]['speed']['tokens_per_second']:.0f}" in int4


def test_overhead_counts_each_part() -> None:
    found = overhead.measure(1, ["int4"], rounds=1)
    assert found["questions"] == 12
    assert all(found[name]["cpu"] > 0 and found[name]["wall"] > 0 for name in ("lm_eval", "making", "compare"))
