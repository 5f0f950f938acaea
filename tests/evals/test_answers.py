"""Questions through lm-eval: the answers are those of the logits, the figures those of its command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit.command import run
from lowbit.command.model_source import load_model, load_tokenizer
from lowbit.evals import evaluation, harness
from lowbit.evals.exam import LETTERS, Question, prompt, read_exam
from lowbit.evals.tasks import read_tasks, suite_of


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
    assert score.shots == 1
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
