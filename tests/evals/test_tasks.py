"""Tasks from folders and files: exams as MMLU came, rows of many kinds, texts."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lowbit.command import run
from lowbit.evals import evaluation, harness
from lowbit.evals.exam import LETTERS, prompt, read_exam
from lowbit.evals.tasks import MissingDataError, TaskError, read_tasks
from lowbit.evals.texts import read_text


def test_subjects_and_groups_come_from_the_folder(folder: Path) -> None:
    suite = read_tasks(["mmlu"], folder, limit=4)
    assert suite.members == {"mmlu": ("mmlu_anatomy", "mmlu_philosophy", "mmlu_words")}
    assert set(suite.groups) == {"mmlu", "mmlu_stem", "mmlu_humanities"}
    assert suite.questions == 12
    assert read_tasks(["mmlu_stem"], folder).members == {"mmlu_stem": ("mmlu_anatomy",)}
    assert read_tasks(["mmlu_words", "mmlu_anatomy"], folder).questions == 18


@pytest.mark.parametrize("shots", [0, 3])
def test_the_prompt_is_the_one_that_mmlu_came_with(folder: Path, shots: int) -> None:
    suite = read_tasks(["mmlu"], folder, shots=shots)
    for subject in ("anatomy", "words"):
        task = suite.tasks[f"mmlu_{subject}"]
        examples = [q for q in read_exam(folder, "dev") if q.subject == subject][:shots]
        asked = [q for q in read_exam(folder) if q.subject == subject]
        for question, row in zip(asked, task.eval_docs, strict=True):
            assert task.fewshot_context(row, num_fewshot=shots) == prompt(question, examples)


@pytest.mark.parametrize(
    ("names", "options", "kind", "words"),
    [
        (["mmlu_virology"], {}, MissingDataError, "holds no test/virology_test.csv"),
        (["mmlu_virology", "mmlu_marketing"], {}, MissingDataError, r"virology_test.csv.*; .*marketing_test.csv"),
        (
            ["mmlu_social_sciences"],
            {},
            MissingDataError,
            "no subject of mmlu_social_sciences: it holds anatomy, ph",
        ),
        (["mmlu_anatmoy"], {}, TaskError, "no subject 'anatmoy'.*did you mean anatomy"),
        (["mmlu"], {"shots": 6}, MissingDataError, "asks for 6 solved examples.*there are 5"),
        (["mmlu"], {"limit": 0}, ValueError, "at least 1 question"),
    ],
)
def test_what_is_missing_is_said(folder: Path, names: list[str], options: dict[str, int], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        read_tasks(names, folder, **options)


def test_folders_that_lack_something(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="must be a folder"):
        read_tasks(["mmlu"], tmp_path / "absent")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "words_test.csv").write_bytes((folder / "test" / "words_test.csv").read_bytes())
    assert read_tasks(["mmlu"], tmp_path, shots=0).questions == 9
    with pytest.raises(ValueError, match=r"holds no dev/words_dev\.csv"):
        read_tasks(["mmlu"], tmp_path, shots=1)


def test_other_tasks_from_a_folder(tmp_path: Path, loaded: tuple[nn.Module, Any]) -> None:
    """Rows with the hub's fields, and rows that are written out, ask the same."""
    piqa = [{"goal": f"w{i}", "sol1": f"w{i + 1}", "sol2": f"w{i + 2}", "label": i % 2} for i in range(6)]
    written = [{"query": f"Question: {r['goal']}\n", "choices": [r["sol1"], r["sol2"]], "gold": r["label"]} for r in piqa]
    suites = []
    for rows in (piqa, written):
        (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (tmp_path / "lambada_openai.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}) + "\n", encoding="utf-8")
        suites.append(read_tasks(["piqa", "lambada_openai"], tmp_path, limit=5))
    results = [harness.scores_of(harness.ask(*loaded, suite), suite) for suite in suites]
    assert results[0] == results[1]
    assert results[0]["piqa"].n == 5
    assert {sample["picked"] for sample in results[0]["piqa"].samples} <= {0, 1}
    assert results[0]["lambada_openai"].metric == "acc"
    with pytest.raises(MissingDataError, match=r"hellaswag\.jsonl.*fetch the split 'validation' of Rowan/hellaswag"):
        read_tasks(["hellaswag"], tmp_path)
    with pytest.raises(TaskError, match="knows no task 'piqua'; did you mean piqa"):
        read_tasks(["piqua"], tmp_path)
    (tmp_path / "piqa.jsonl").write_text('{"goal": "w1"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"do not have its fields \(goal\)"):
        read_tasks(["piqa"], tmp_path)
    (tmp_path / "wikitext.jsonl").write_text('{"page": "w1"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="wikitext"):
        read_tasks(["wikitext"], tmp_path)


LETTERS_OF = {"text": ["w1", "w2", "w3", "w4"], "label": list(LETTERS)}
ROWS: dict[str, list[dict[str, Any]]] = {
    "hellaswag": [
        {"activity_label": "w0", "ctx_a": f"w{i}", "ctx_b": "w1", "ctx": f"w{i} w1", "endings": ["w1", "w2", "w3", "w4"],
         "label": str(i % 4), "ind": i, "split": "val"} for i in range(6)
    ],
    "arc_easy": [{"id": str(i), "question": f"w{i}", "choices": LETTERS_OF, "answerKey": LETTERS[i % 4]} for i in range(6)],
    "arc_challenge": [{"id": str(i), "question": f"w{i}", "choices": LETTERS_OF, "answerKey": LETTERS[i % 4]} for i in range(6)],
    "gsm8k": [{"question": f"w{i} w{i}", "answer": f"w{i} #### {i}"} for i in range(6)],
    "lambada_openai": [{"text": f"w1 w2 w{i}"} for i in range(6)],
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """Rows of other tasks with the fields that the hub's have, and an exam beside them."""
    made = tmp_path_factory.mktemp("rows")
    for name, some in ROWS.items():
        write_rows(made / f"{name}.jsonl", some)
    (made / "test").mkdir()
    (made / "test" / "words_test.csv").write_bytes((folder / "test" / "words_test.csv").read_bytes())
    return made


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_suite_of_many_kinds(rows: Path, loaded: tuple[nn.Module, Any]) -> None:
    """Choices by letter and by text, last words and written answers, in one go; each with lm-eval's own error of its mean."""
    suite = read_tasks(["mmlu", "hellaswag", "ai2_arc", "lambada_openai", "gsm8k"], rows, shots=0, limit=4)
    net, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    net.config.max_position_embeddings = 512  # room for the answers that lm-eval lets a model write
    scores = harness.scores_of(harness.ask(net, tokenizer, suite), suite)
    assert set(scores) == {"mmlu", "hellaswag", "arc_easy", "arc_challenge", "lambada_openai", "gsm8k"}
    assert {name: score.metric for name, score in scores.items() if score.metric != "acc"} == {"gsm8k": "exact_match"}
    for name, score in scores.items():
        right = score.right
        assert score.n == len(right) == 4
        assert score.value == sum(right) / 4, name
        assert score.stderr == pytest.approx((score.value * (1 - score.value) / 3) ** 0.5), name
    assert all(isinstance(sample["picked"], str) for sample in scores["gsm8k"].samples)
    assert {sample["subject"] for sample in scores["mmlu"].samples} == {"words"}


def test_solved_examples_come_from_the_split_that_the_task_names(rows: Path, tmp_path: Path) -> None:
    for name in ("gsm8k", "hellaswag"):
        write_rows(tmp_path / f"{name}.jsonl", ROWS[name][:2])
    with pytest.raises(MissingDataError, match=r"no train/gsm8k_train\.jsonl .*split 'train' of openai/gsm8k, or .* 0 shots"):
        read_tasks(["gsm8k"], tmp_path)  # lm-eval asks it with five
    with pytest.raises(MissingDataError, match=r"no train/hellaswag_train\.jsonl"):
        read_tasks(["hellaswag"], tmp_path, shots=1)
    assert read_tasks(["gsm8k"], tmp_path, shots=0).questions == 2
    write_rows(tmp_path / "train" / "gsm8k_train.jsonl", ROWS["gsm8k"][2:])
    task = read_tasks(["gsm8k"], tmp_path, shots=3).tasks["gsm8k"]
    task.set_fewshot_seed(1234)
    context = task.fewshot_context(task.eval_docs[0], num_fewshot=3)
    solved = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in ROWS["gsm8k"][2:]]
    *examples, asked = context.split("\n\n")
    assert asked == "Question: w0 w0\nAnswer:"
    assert len(set(examples)) == 3
    assert set(examples) < set(solved)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_hub")
def test_no_hub_is_said_at_once(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDataError, match=r"cais/mmlu on the hub\) cannot be had: .*--data FOLDER"):
        read_tasks(["mmlu_anatomy"])
    monkeypatch.setattr(evaluation, "compare", lambda *_, **__: pytest.fail("a model was asked for"))
    assert run(["eval", str(model), "--tasks", "perplexity", "--text", "wikitext"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the text wikitext (Salesforce/wikitext on the hub) cannot be had" in line
    assert line.endswith("fetch it where there is a network, or give a file with --text FILE")


def test_wikitext_is_its_raw_rows_with_blank_lines_between(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    asked: list[Any] = []
    rows = datasets.Dataset.from_dict({"text": ["", " = Title = \n", "", " One line . \n"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *what, split: asked.append((*what, split)) or rows)
    monkeypatch.setattr("lowbit.evals.tasks._has_address", lambda _: True)
    monkeypatch.chdir(tmp_path)
    assert read_text("wikitext") == "\n\n = Title = \n\n\n\n\n One line . \n"
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    (tmp_path / "wikitext").write_text("w1", encoding="utf-8")
    assert read_text("wikitext") == "w1"
