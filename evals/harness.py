"""Asking a model through lm-eval: its prompts, its batches, its metrics; each question's outcome beside them."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .cache import Cache
from .results import replace_file
from .tasks import Suite, quiet_harness

__all__ = ["BATCH", "Score", "ask", "scores_of", "write_results"]

BATCH = 16
"""Prompts in a batch: as many as lm-eval is asked for with ``--batch_size 16``."""
_SEED = 1234  # lm-eval's own, for the examples that it draws


@dataclass(frozen=True)
class Score:
    """How a model did on a task or a group of tasks.

    Attributes:
        metric: lm-eval's name of what was measured, such as ``"acc"``.
        n, value, stderr: questions, lm-eval's figure over them (0..1) and its standard error.
        subjects: ``{"n", "value"}`` of each task of a group, None for a single task.
        samples: ``{"id", "subject", "right", "picked"}`` of each question, always in the same order.
        shots: solved examples before each question, of the first task of a group.
    """

    metric: str
    n: int
    value: float
    stderr: float | None
    subjects: Mapping[str, Mapping[str, float]] | None
    samples: Sequence[Mapping[str, Any]] = field(repr=False)
    shots: int | None = None

    @property
    def right(self) -> list[bool]:
        """Whether each question was answered right."""
        return [sample["right"] for sample in self.samples]


def ask(
    model: nn.Module,
    tokenizer: Any,
    suite: Suite,
    *,
    batch: int = BATCH,
    cache: Cache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """lm-eval's results for ``model`` on the tasks of ``suite``, with a sample for each question.

    The same figures, to the last digit, as ``lm_eval --model hf --batch_size BATCH`` gives on the same rows.

    Args:
        batch: prompts at a time; a model's arithmetic may differ in the last bits from batch size to batch size.
        cache: where answers are written as they come, so that a second call asks only what was not answered.
        progress: called with (answers given, answers in all).

    Raises ``ValueError`` for a tokenizer that lm-eval cannot work with.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            "lm-eval needs a token for the beginning or the end of a text, and the tokenizer names neither: set eos_token"
        )
    start = time.time()
    for task in suite.tasks.values():
        task.set_fewshot_seed(_SEED)
    # lm-eval draws bars of its own on stderr, and the caller has one.
    with _harness_to_itself() as shortened, contextlib.redirect_stderr(io.StringIO()):
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        with (cache or Cache()).answers(lm, {"batch": batch}) as asked, _no_waste(), torch.inference_mode():
            if progress is not None:
                lm.set_cache_hook(_Counting(lm.cache_hook, suite, progress))
            loaded = {"tasks": dict(suite.tasks), "groups": dict(suite.groups)}
            results = evaluate(asked, loaded, limit=suite.limit)
        _describe(results, lm, suite, batch, start)
    results["shortened"] = shortened.count
    return results


class _Counting:
    """Stands in lm-eval's hook for answers as they come, and counts them."""

    def __init__(self, inner: Any, suite: Suite, progress: Callable[[int, int], None]) -> None:
        self.inner, self.progress, self.done = inner, progress, 0
        self.total = sum(suite.size(name) * _choices(task) for name, task in suite.tasks.items())

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        self.inner.add_partial(kind, request, answer)
        self.done += 1
        if self.done % 16 == 0 or self.done >= self.total:
            self.progress(min(self.done, self.total), self.total)


def _choices(task: Any) -> int:
    """Answers of a model to one question."""
    return len(task.doc_to_choice(task.eval_docs[0])) if task.OUTPUT_TYPE == "multiple_choice" else 1


class _Shortened(logging.Handler):
    """Counts the prompts that lm-eval says it cut to the model's context."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "runcat" in record.getMessage()


@contextlib.contextmanager
def _harness_to_itself() -> Iterator[_Shortened]:
    """lm-eval's remarks are counted, and its seeds leave the program's random numbers as they were."""
    counting, logger = _Shortened(logging.WARNING), logging.getLogger("lm_eval.models.huggingface")
    level, passing = logger.level, logger.propagate
    python, array, generator = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    logger.addHandler(counting)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        with quiet_harness():
            yield counting
    finally:
        logger.removeHandler(counting)
        logger.setLevel(level)
        logger.propagate = passing
        random.setstate(python)
        np.random.set_state(array)
        torch.random.set_rng_state(generator)


@contextlib.contextmanager
def _no_waste() -> Iterator[None]:
    """lm-eval without what takes longer than a small model's answers and changes no figure of ours.

    It compiles the template of a prompt for every question. And for the error of a metric that has no formula for it, such as
    LAMBADA's perplexity, it resamples a hundred thousand times in processes of its own: that error is left out.
    """
    from lm_eval import evaluator_utils
    from lm_eval.api.metrics import acc_all, mean
    from lm_eval.utils import env

    formula = evaluator_utils.stderr_for_metric
    evaluator_utils.stderr_for_metric = lambda metric, **n: formula(metric, **n) if metric in (mean, acc_all) else None
    env.from_string = functools.lru_cache(maxsize=1024)(env.from_string)
    try:
        yield
    finally:
        del env.from_string
        evaluator_utils.stderr_for_metric = formula


def _describe(results: dict[str, Any], lm: Any, suite: Suite, batch: int, start: float) -> None:
    """What lm-eval's ``simple_evaluate`` writes beside results."""
    from lm_eval import __version__
    from lm_eval.loggers.utils import add_tokenizer_info

    results["config"] = {
        "model": "hf", "model_args": None, "model_num_parameters": lm.model.num_parameters(),
        "model_dtype": str(lm.model.dtype), "batch_size": batch, "batch_sizes": [], "device": str(lm.device),
        "use_cache": None, "limit": suite.limit, "bootstrap_iters": None, "gen_kwargs": None, "fewshot_seed": _SEED,
    }  # fmt: skip
    results |= {"date": start, "lm_eval_version": __version__, "end_time": time.time()}
    add_tokenizer_info(results, lm)


# ---- results ---------------------------------------------------------------------------------------------------------


def scores_of(results: Mapping[str, Any], suite: Suite) -> dict[str, Score]:
    """lm-eval's ``results`` by the names of ``suite``."""
    return {name: _score(results, suite, name) for name in suite.members}


def _score(results: Mapping[str, Any], suite: Suite, name: str) -> Score:
    members, found = suite.members[name], results["results"]
    metric, kind = _metric(found[members[0]])
    key = f"{metric},{kind}"
    samples = [
        {
            "id": f"{task}:{sample['doc_id']}",
            "subject": suite.subject(name, task),
            "right": bool(sample[metric]),
            "picked": _picked(sample),
        }
        for task in members
        for sample in results["samples"][task]
        if sample["filter"] == kind
    ]
    error = found[name].get(f"{metric}_stderr,{kind}")
    alone = members == (name,)
    subjects = {str(suite.subject(name, task)): {"n": found[task]["sample_len"], "value": found[task][key]} for task in members}
    usable = isinstance(error, float) and math.isfinite(error)
    shots = results["n-shot"][members[0]]
    return Score(metric, len(samples), found[name][key], error if usable else None, None if alone else subjects, samples, shots)


def _metric(found: Mapping[str, Any]) -> tuple[str, str]:
    """The metric that models are compared by and the first of lm-eval's filters, from the figures of a task."""
    keys = [key.split(",") for key in found if "," in key and "_stderr," not in key]
    return next((metric, kind) for wanted in ("acc", "exact_match") for metric, kind in keys if metric == wanted)


def _picked(sample: Mapping[str, Any]) -> str | int | None:
    """What the model chose: a letter where the choices are letters, else its place; the text that it wrote."""
    answers = sample["filtered_resps"]
    if isinstance(answers[0], str):
        return answers[0]
    if len(answers) < 2:
        return None
    place = int(np.argmax([likelihood for likelihood, _ in answers]))
    words = [str(arguments[1]).strip() for arguments in sample["arguments"]]
    return words[place] if all(len(word) == 1 for word in words[: len(answers)]) else place


def write_results(results: Mapping[str, Any], folder: Path) -> Path:
    """lm-eval's own JSON, without samples, as ``results_DATE.json`` in ``folder``, where its other tools look for it."""
    import json
    from datetime import datetime

    from lm_eval.utils import handle_non_serializable

    date = datetime.fromtimestamp(results["date"]).isoformat().replace(":", "-")
    path = folder / f"results_{date}.json"
    plain = {key: value for key, value in results.items() if key not in ("samples", "shortened")}
    replace_file(path, json.dumps(plain, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n")
    return path
