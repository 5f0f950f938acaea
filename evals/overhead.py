"""What comparing recipes costs beside lm-eval alone: the bundled exam over ten of them.

    python -m lowbit.evals.overhead --limit 17

In seconds of CPU, which other work on the machine does not change, and seconds by the clock.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit import quantize_

from .evaluation import TOY_DATA, Material, compare
from .harness import BATCH
from .results import write_result
from .tasks import MMLU, quiet_harness, read_tasks
from .toy import bundled

__all__ = ["RECIPES", "main", "measure"]

RECIPES = (
    "int8", "int8_dynamic_activation_int8_weight", "int4", "int4_sym", "int3", "int2", "fp8", "nf4", "mxfp4", "nvfp4",
)  # fmt: skip


def measure(limit: int, recipes: Sequence[str] = RECIPES, rounds: int = 3) -> dict[str, Any]:
    """The bundled toy model and it by each of ``recipes``, ``limit`` questions a subject.

    Each figure is ``{"cpu", "wall"}`` in seconds, that of the ``rounds`` with the least CPU: ``lm_eval`` asks models that
    are quantized already by lm-eval's own ``evaluate``; ``making`` copies and quantizes them; ``compare`` does all that
    :func:`lowbit.evals.evaluation.compare` does, with a cache on the disk.
    """
    model, tokenizer = bundled.load()
    suite = read_tasks([MMLU], TOY_DATA, limit=limit)
    material = Material(suite, None)

    def make() -> list[nn.Module]:
        return [model, *(_quantized(model, recipe) for recipe in recipes)]

    def alone() -> None:
        for each in made:
            _lm_eval(each, tokenizer, suite)

    def compared() -> None:
        with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
            compare(lambda: copy.deepcopy(model), tokenizer, recipes, material, cache=folder)

    made = make()
    _lm_eval(model, tokenizer, suite)  # what is imported and set up once is nobody's
    steps: dict[str, Callable[[], Any]] = {"lm_eval": alone, "making": make, "compare": compared}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(_timed(step))
    best = {name: min(found, key=lambda seconds: seconds["cpu"]) for name, found in taken.items()}
    return {"questions": suite.questions, "recipes": list(recipes), "rounds": rounds, **best}


def _quantized(model: nn.Module, recipe: str) -> nn.Module:
    made = copy.deepcopy(model)
    quantize_(made, recipe)
    return made


def _lm_eval(model: nn.Module, tokenizer: Any, suite: Any) -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    with quiet_harness(), torch.inference_mode():
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)
        evaluate(lm, {"tasks": dict(suite.tasks), "groups": dict(suite.groups)}, limit=suite.limit)


def _timed(step: Callable[[], Any]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time a comparison of recipes beside lm-eval alone.")
    parser.add_argument("--limit", type=int, default=17, help="exam questions a subject: there are twelve subjects")
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many counts")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    found = measure(options.limit, rounds=options.rounds)
    if options.out is not None:
        write_result(options.out, {"threads": torch.get_num_threads(), **found})
    names = {"lm_eval": "lm-eval alone", "making": "making the models", "compare": "all of the comparison"}
    for name, words in names.items():
        print(f"{words}: {found[name]['cpu']:.1f} s of CPU, {found[name]['wall']:.1f} s")
    more = (found["compare"]["cpu"] - found["making"]["cpu"]) / found["lm_eval"]["cpu"] - 1
    what = f"{found['questions']} questions, {len(found['recipes'])} recipes and the float model"
    print(f"{what}: {100 * more:+.1f} % over lm-eval")


if __name__ == "__main__":
    main()
