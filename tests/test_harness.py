"""Questions through lm-eval: tasks from folders, the same figures as its command line, work that goes on where it was."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import lowbit
from lowbit.command import run
from lowbit.command.model_source import load_model, load_tokenizer
from lowbit.evals import evaluation, harness
from lowbit.evals.cache import Cache, fingerprint
from lowbit.evals.exam import LETTERS, Question, prompt, read_exam
from lowbit.evals.perplexity import perplexity
from lowbit.evals.tasks import MissingDataError, TaskError, read_tasks, suite_of
from lowbit.evals.texts import read_text
from tests.models import exam_and_text, word_model, write_exam

REAL = os.environ.get("LOWBIT_EVAL_DATA")
"""A folder with ``mmlu/dev``, ``mmlu/test``, ``text/*.txt`` and ``models/*`` to test on; nothing else is needed."""

real = pytest.mark.skipif(REAL is None, reason="LOWBIT_EVAL_DATA names no folder with real questions, texts and models")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exam of two subjects that MMLU has and one that it has not."""
    made = tmp_path_factory.mktemp("exam")
    for split, count in (("dev", 5), ("test", 9)):
        for subject in ("anatomy", "philosophy", "words"):
            rows = ([f"w{i} w{i + 1}?", *(f"w{(i * i + j) % 40}" for j in range(4)), LETTERS[i % 4]] for i in range(count))
            write_exam(made, split, subject, rows)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exam_and_text(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[nn.Module, Any]:
    with_layers = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return with_layers, transformers.AutoTokenizer.from_pretrained(model)


# ---- tasks -----------------------------------------------------------------------------------------------------------


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


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_logits(folder: Path, loaded: tuple[nn.Module, Any]) -> None:
    """Of the four letters the one with the highest logit, whatever shares its batch."""
    net, tokenizer = loaded
    suite = read_tasks(["mmlu"], folder, shots=1)
    seen: list[tuple[int, int]] = []
    score = harness.scores_of(harness.ask(net, tokenizer, suite, batch=5, progress=lambda *step: seen.append(step)), suite)[
        "mmlu"
    ]
    letters = tokenizer(list(LETTERS), add_special_tokens=False)["input_ids"]
    questions = read_exam(folder)
    examples = {q.subject: [q] for q in reversed(read_exam(folder, "dev"))}
    assert len(score.samples) == len(questions) == 27
    for sample, question in zip(score.samples, questions, strict=True):
        ids = torch.tensor([tokenizer(prompt(question, examples[question.subject]))["input_ids"]])
        with torch.no_grad():
            four = net(ids).logits[0, -1, [letter for (letter,) in letters]]
        assert sample["picked"] == LETTERS[int(four.argmax())]
        assert sample["right"] == (sample["picked"] == LETTERS[question.answer])
        assert sample["subject"] == question.subject
    assert len({sample["picked"] for sample in score.samples}) > 1
    assert score.value == pytest.approx(sum(score.right) / 27)
    assert {subject: found["n"] for subject, found in score.subjects.items()} == {"anatomy": 9, "philosophy": 9, "words": 9}
    assert seen[-1] == (108, 108)


def test_questions_in_memory(loaded: tuple[nn.Module, Any], folder: Path) -> None:
    questions = [q for q in read_exam(folder) if q.subject == "words"]
    suite, from_folder = suite_of(questions), read_tasks(["mmlu_words"], folder)
    ours = harness.scores_of(harness.ask(*loaded, suite), suite)["mmlu"]
    theirs = harness.scores_of(harness.ask(*loaded, from_folder), from_folder)["mmlu_words"]
    assert ours.right == theirs.right


def test_prompts_beyond_the_context_are_counted(loaded: tuple[nn.Module, Any]) -> None:
    long = Question("words", "w1 " * 200, ("w1", "w2", "w3", "w4"), 0)
    results = harness.ask(*loaded, suite_of([long, dataclasses.replace(long, text="w1")]))
    assert results["shortened"] == 1


YAML = """\
task: exam_{subject}
dataset_path: csv
dataset_kwargs:
  data_files:
    test: {folder}/test/{subject}_test.csv
    dev: {folder}/dev/{subject}_dev.csv
  column_names: [question, a, b, c, d, letter]
test_split: test
fewshot_split: dev
fewshot_config:
  sampler: first_n
output_type: multiple_choice
description: "The following are multiple choice questions (with answers) about {subject}.\\n\\n"
doc_to_text: "{{{{question.strip()}}}}\\nA. {{{{a}}}}\\nB. {{{{b}}}}\\nC. {{{{c}}}}\\nD. {{{{d}}}}\\nAnswer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: "{{{{['A', 'B', 'C', 'D'].index(letter)}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def command_line(
    pretrained: Path, tasks: Path, out: Path, *options: str, through: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """lm-eval's own command line, in a process of its own, behind ``through``: its results and its samples by task."""
    names = ",".join(sorted(path.stem for path in tasks.glob("*.yaml")))
    arguments = ["--model", "hf", "--model_args", f"pretrained={pretrained}", "--tasks", names, "--include_path", str(tasks)]
    arguments += ["--device", "cpu", "--output_path", str(out), "--log_samples", *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(out / "cache"), "TQDM_DISABLE": "1"}
    program = [sys.executable, *through, "-m", "lm_eval", *arguments]
    done = subprocess.run(program, env={**os.environ, **offline}, capture_output=True, text=True, check=False, cwd=out.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = out.glob("*/results_*.json")
    samples = {}
    for path in out.glob("*/samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        samples["_".join(path.name.split("_")[1:-1])] = sorted(rows, key=lambda row: row["doc_id"])
    return json.loads(results.read_text(encoding="utf-8")), samples


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "int4"])
def test_the_same_figures_as_lm_evals_command_line(tmp_path: Path, recipe: str | None) -> None:
    """A quantized folder comes to lm-eval through transformers' loader, and to us by lowbit.load: the same to the last digit."""
    source, through = evaluation.TOY, ()
    if recipe is not None:
        source, through = tmp_path / "quantized", ("-m", "lowbit")
        assert run(["quantize", str(evaluation.TOY), "--recipe", recipe, "-o", str(source)]) == 0
    for subject in ("astronomy", "botany"):
        (tmp_path / f"exam_{subject}.yaml").write_text(YAML.format(subject=subject, folder=evaluation.TOY_DATA), encoding="utf-8")
    options = ("--limit", "12", "--num_fewshot", "2", "--batch_size", "8")
    theirs, asked = command_line(source, tmp_path, tmp_path / "out", *options, through=through)
    suite = read_tasks(["mmlu_astronomy", "mmlu_botany"], evaluation.TOY_DATA, limit=12, shots=2)
    net = load_model(str(source))
    assert any(isinstance(module, lowbit.QLinear) for module in net.modules()) == (recipe is not None)
    ours = harness.ask(net, load_tokenizer(str(source)), suite, batch=8)
    for subject in ("astronomy", "botany"):
        mine, other = ours["results"][f"mmlu_{subject}"], theirs["results"][f"exam_{subject}"]
        assert (mine["acc,none"], mine["acc_stderr,none"]) == (other["acc,none"], other["acc_stderr,none"])
        for sample, row in zip(ours["samples"][f"mmlu_{subject}"], asked[f"exam_{subject}"], strict=True):
            assert sample["arguments"][0][0] == row["arguments"]["gen_args_0"]["arg_0"]
            assert [[str(value) for value in answer] for answer in sample["filtered_resps"]] == row["filtered_resps"]


# ---- comparing -------------------------------------------------------------------------------------------------------


def read(folder: Path, text: Path | None = None, **options: Any) -> evaluation.Material:
    return evaluation.Material.read(folder, text, context=32, **options)


def test_models_are_compared_on_the_same_material(
    folder: Path, loaded: tuple[nn.Module, Any], material: Path, tmp_path: Path
) -> None:
    net, tokenizer = loaded
    steps: list[str] = []
    outcomes = evaluation.compare(
        lambda: copy.deepcopy(net), tokenizer, ["int8", "int2_g32"], read(folder, material / "text.txt", compared=4), files=True,
        progress=lambda what, done, total: steps.append(what),
    )  # fmt: skip
    plain, int8, int2 = outcomes
    assert [o.recipe for o in outcomes] == ["float", "int8", "int2_g32"]
    assert plain.bits_per_weight == 32
    assert plain.differences == {}
    assert plain.divergence is None
    assert plain.kernels == {"decode": {}, "prompt": {}}
    assert int8.bits_per_weight > 8 > int2.bits_per_weight > 2
    assert plain.file_bytes > int8.file_bytes > int2.file_bytes
    assert plain.size["codes"] == plain.size["scales"] == 0
    lowbit.save(quantized(net, "int8"), tmp_path / "int8")
    assert sum(int8.size.values()) == sum(t.nbytes for t in load_file(tmp_path / "int8" / "model.safetensors").values())
    assert int8.size["codes"] > 3 * int2.size["codes"] > 0
    assert abs(int8.perplexity.loss - plain.perplexity.loss) < abs(int2.perplexity.loss - plain.perplexity.loss)
    assert 0 <= int8.divergence.kl < int2.divergence.kl
    paired = int2.differences["mmlu"]
    assert paired.n == 27
    assert paired.difference == pytest.approx(int2.tasks["mmlu"].value - plain.tasks["mmlu"].value)
    assert paired.holm >= paired.mcnemar
    assert sum(int8.kernels["decode"].values()) == sum(int8.kernels["prompt"].values()) == 7
    assert min(row["sqnr_db"] for row in int8.layers) > max(row["sqnr_db"] for row in int2.layers)
    assert "int8: perplexity" in steps
    assert int8.to_dict()["tasks"]["mmlu"]["difference"]["n"] == 27


def quantized(net: nn.Module, recipe: str) -> nn.Module:
    made = copy.deepcopy(net)
    lowbit.quantize_(made, recipe)
    return made


def test_a_text_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.txt cannot be read: No such file"):
        read(folder, tmp_path / "absent.txt")


# ---- going on --------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts the batches that a model is asked, and dies at the one that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, 10**9

    def watch(self, net: nn.Module) -> nn.Module:
        def count(*_: object) -> None:
            self.calls += 1
            if self.calls > self.last:
                raise KeyboardInterrupt

        net.register_forward_pre_hook(count)
        return net


def test_an_interrupted_evaluation_goes_on(folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path) -> None:
    net, tokenizer = loaded
    source = read(folder, batch=1)

    def measure(last: int = 10**9, recipes: tuple[str, ...] = ("int8",), of: nn.Module = net, what: Any = source, **options: Any):
        counting = Counting()
        counting.last = last
        try:
            outcomes = evaluation.compare(lambda: counting.watch(copy.deepcopy(of)), tokenizer, recipes, what, **options)
        except KeyboardInterrupt:
            outcomes = None
        return outcomes, counting.calls

    whole, all_calls = measure()
    kept = {"cache": tmp_path}
    assert measure(5, **kept)[0] is None  # in the float model's questions
    assert measure(9, **kept)[0] is None  # in the recipe's
    resumed, calls = measure(**kept)
    assert calls == all_calls - 14
    assert [o.tasks for o in resumed] == [o.tasks for o in whole]
    assert [o.differences for o in resumed] == [o.differences for o in whole]
    again, calls = measure(**kept)
    assert calls == 0
    assert [o.to_dict() for o in again] == [o.to_dict() for o in resumed]

    # Another recipe, other questions, another batch size or another model is never answered from what is there.
    assert measure(recipes=("int4",), **kept)[1] >= 7
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.lm_head.weight[3] += 2
    fresh, calls = measure(of=other, **kept)
    assert calls == all_calls
    assert [o.tasks for o in fresh] == [o.tasks for o in measure(of=other)[0]]
    assert measure(what=read(folder, batch=1, shots=1), **kept)[1] == all_calls - 2 * 2
    assert measure(what=read(folder, batch=3), **kept)[1] > 0


def test_a_calibrated_recipe_is_measured_anew_on_another_text(
    loaded: tuple[nn.Module, Any], material: Path, tmp_path: Path
) -> None:
    net, tokenizer = loaded
    text = (material / "text.txt").read_text(encoding="utf-8")
    source = evaluation.Material.read(None, material / "text.txt", tasks=(), context=32, chunks=4)
    losses = {}
    for data in (text, text[::-1].replace("w", "D "), text):
        made = lowbit.Calibration([data], length=64, tokenizer=tokenizer)
        recipes = ["int2", lowbit.Recipe.parse("gptq(int2)")]
        for cache in (tmp_path, None):
            found = evaluation.compare(lambda: copy.deepcopy(net), tokenizer, recipes, source, calibration=made, cache=cache)
            losses.setdefault((data, "cached" if cache else "fresh"), []).append([o.perplexity.value for o in found])
    first, *others = losses.values()
    assert losses[text, "cached"] == losses[text, "fresh"] == [first[0], first[0]]
    assert others[1][0][:2] == first[0][:2]  # neither the float model nor round-to-nearest looks at the data
    assert others[1][0][2] != first[0][2]
    tensor = lowbit.Calibration(torch.ones(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="a text file or a list of strings"):
        evaluation.compare(lambda: copy.deepcopy(net), tokenizer, ["clip(int4)"], source, calibration=tensor, cache=tmp_path)


def test_the_command_calibrates(model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(material / "text.txt")
    recipes = "int3,gptq(int3, damping=0.02, passes=1)"
    asked = ["eval", str(model), "-r", recipes, "--tasks", "perplexity", "--text", text, "--context", "32", "--json"]
    assert run([*asked, "--divergence", "0"]) == 2
    assert "looks at data: give a text with --calibration FILE" in capsys.readouterr().err
    assert run([*asked, "--divergence", "0", "--calibration", text, "--rows", "4", "--length", "32"]) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert [outcome["recipe"] for outcome in outcomes] == ["float", "int3", "gptq(int3, damping=0.02, passes=1)"]
    assert outcomes[1]["perplexity"]["value"] != outcomes[2]["perplexity"]["value"]


def test_a_fingerprint_is_of_the_content(loaded: tuple[nn.Module, Any], model: Path) -> None:
    net, tokenizer = loaded
    first = fingerprint(net, tokenizer)
    again = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert fingerprint(again, tokenizer) == first
    changed = copy.deepcopy(net)
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-6
    halves = copy.deepcopy(net).half()
    configured = copy.deepcopy(net)
    configured.config.rms_norm_eps *= 2
    weights_alone, with_activations = quantized(net, "int8"), quantized(net, "int8_dynamic_activation_int8_weight")
    words = copy.deepcopy(tokenizer)
    words.add_tokens(["w99"])
    others = [fingerprint(m, tokenizer) for m in (changed, halves, configured, weights_alone, with_activations)]
    assert len({first, *others, fingerprint(net, words)}) == 7


def test_figures_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "key")
    assert cache.figure("name", 1, lambda: [1.5, None]) == [1.5, None]
    assert cache.figure("name", 1, lambda: 1 / 0) == [1.5, None]
    with pytest.raises(ZeroDivisionError):
        cache.figure("name", 2, lambda: 1 / 0)
    (half,) = (tmp_path / next(tmp_path.iterdir()).name).glob("name-*.json")
    half.write_text("[1.5, nu", encoding="utf-8")
    assert cache.figure("name", 1, lambda: 2) == 2
    with pytest.raises(ZeroDivisionError):
        Cache(tmp_path, "another").figure("name", 1, lambda: 1 / 0)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_eval_writes_a_folder(
    model: Path,
    folder: Path,
    material: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, out = material / "text.txt", tmp_path / "out"
    options = ["--data", folder, "--text", text, "--limit", 4, "--context", 32, "--stride", 16, "--chunks", 6, "--out", out]
    asked = ["-r", "int8,int3_g32", "--tasks", "mmlu,mmlu_philosophy,perplexity"]
    assert run([*map(str, ("eval", model, *asked, *options))]) == 0, capsys.readouterr().err
    assert "int3_g32" in capsys.readouterr().out
    found = json.loads((out / "eval.json").read_text())
    assert (out / "report.html").is_file()
    assert found["format"] == "lowbit-eval/1"
    assert found["tasks"] == ["mmlu", "mmlu_philosophy", "perplexity"]
    assert [outcome["recipe"] for outcome in found["outcomes"]] == ["float", "int8", "int3_g32"]
    for outcome in found["outcomes"]:
        assert outcome["perplexity"]["stride"] == 16
        task = outcome["tasks"]["mmlu"]
        assert {name: row["n"] for name, row in task["subjects"].items()} == {"anatomy": 4, "philosophy": 4, "words": 4}
        (theirs,) = (out / "lm-eval" / outcome["recipe"]).glob("results_*.json")
        results = json.loads(theirs.read_text())["results"]
        assert results["mmlu"]["acc,none"] == task["value"]
        assert results["mmlu_philosophy"]["acc,none"] == outcome["tasks"]["mmlu_philosophy"]["value"]
    assert found["outcomes"][2]["divergence"]["tokens"] > 0
    assert run([*map(str, ("eval", model, "-r", "int8", "--tasks", "mmlu", *options, "--json"))]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["outcomes"][1]["tasks"]["mmlu"]["samples"] == found["outcomes"][1]["tasks"]["mmlu"]["samples"]


@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        (2, ["--tasks", ","], "--tasks names no task"),
        (2, ["--tasks", "perplexity"], "needs a text"),
        (2, ["--tasks", "mmlu", "--dtype", "int8"], "--dtype must be float32"),
        (2, ["--tasks", "mmlu", "--out", "FOLDER/test/words_test.csv/out"], "cannot be written"),
        (1, ["--tasks", "mmlu_words,mmlu_frobnicate", "--data", "FOLDER"], "no subject 'frobnicate'"),
        (1, ["--tasks", "mmlu_virology", "--data", "FOLDER"], "holds no test/virology_test.csv"),
    ],
)
def test_eval_errors_are_one_line(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    options: list[str],
    words: str,
) -> None:
    assert run(["eval", str(model), *(option.replace("FOLDER", str(folder)) for option in options)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert words in line


# ---- the real thing --------------------------------------------------------------------------------------------------


@real
def test_real_questions() -> None:
    data = Path(REAL or "") / "mmlu"
    suite = read_tasks(["mmlu"], data, shots=5)
    subjects = {path.name.removesuffix("_test.csv") for path in data.glob("test/*.csv")}
    assert {name.removeprefix("mmlu_") for name in suite.members["mmlu"]} == subjects
    for name, task in suite.tasks.items():
        with (data / "test" / f"{name.removeprefix('mmlu_')}_test.csv").open(newline="") as table:
            for row, doc in zip(csv.reader(table), task.eval_docs, strict=True):
                assert [doc["question"], *doc["choices"], LETTERS[doc["answer"]]] == row


@real
@pytest.mark.slow
def test_real_perplexity() -> None:
    found = perplexity(*real_model("wikibooks-28m"), read_text(real_text("wikitext2_test.txt")), context=512, limit=120)
    assert found.value == pytest.approx(113.79, rel=1e-3)


@real
def test_real_perplexity_of_stories() -> None:
    """Each story alone, behind the token for the beginning of a text."""
    net, tokenizer = real_model("stories260k")
    stories = [story.strip() for story in read_text(real_text("tinystories.txt")).split("<|endoftext|>") if story.strip()]
    begun = [f"{tokenizer.bos_token}{story}" for story in stories[:500]]
    lengths = [min(len(tokenizer(story, add_special_tokens=False)["input_ids"]), 512) for story in begun]
    found = [perplexity(net, tokenizer, story, context=n, limit=1) for story, n in zip(begun, lengths, strict=True)]
    loss = sum(each.loss * each.tokens for each in found) / sum(each.tokens for each in found)
    assert math.exp(loss) == pytest.approx(4.56, rel=1e-3)


@real
def test_real_perplexity_as_llama_begins_a_text() -> None:
    """Behind the token for the beginning and the space that Llama's own tokenizer puts before a text."""
    net, tokenizer = real_model("stories260k")
    text = f"{tokenizer.bos_token} {read_text(real_text('wikitext2_test.txt'))}"
    assert perplexity(net, tokenizer, text, context=512, limit=120).value == pytest.approx(153.5, rel=1e-3)


def real_model(name: str) -> tuple[nn.Module, Any]:
    source = Path(REAL or "") / "models" / name
    net = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return net, transformers.AutoTokenizer.from_pretrained(source)


def real_text(name: str) -> Path:
    return Path(REAL or "") / "text" / name
