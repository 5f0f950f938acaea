"""Pretrained models, questions and texts of a folder that an environment variable names."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lowbit.evals.exam import LETTERS
from lowbit.evals.perplexity import perplexity
from lowbit.evals.tasks import read_tasks
from lowbit.evals.texts import read_text

REAL = os.environ.get("LOWBIT_EVAL_DATA")
"""A folder with ``mmlu/dev``, ``mmlu/test``, ``text/*.txt`` and ``models/*`` to test on; nothing else is needed."""

real = pytest.mark.skipif(REAL is None, reason="LOWBIT_EVAL_DATA names no folder with real questions, texts and models")


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
