"""How long it takes to quantize: one layer by each method, the rewrite's search on its own and the rounder; and whole models.

python -m lowbit.evals.quantizing --device cuda --shapes 4096x4096 --models llama-3-8b --out quantizing.json
python -m lowbit.evals.quantizing --recipes int4,int8 --shapes 65536x8192     a layer of 1 GB, without data
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit import Recipe, quantize_
from lowbit.algorithms import ROUNDERS
from lowbit.recipe import split_recipes
from lowbit.rewrites.search import Pool, Reader
from lowbit.rounding import round_weight
from lowbit.statistics import Statistics

from .results import write_result
from .shapes import SHAPES, random_model

__all__ = ["RECIPES", "main", "measure", "measure_models"]

RECIPES = (
    "int4", "hqq(int4)", "clip(int4)", "gptq(int4)", "gptq(int3)", "awq(int4)", "awq(int3)", "awq(nvfp4)",
    "smoothquant(int8_dynamic_activation_int8_weight, alpha=auto)",
)  # fmt: skip
MODEL_RECIPES = ("int4", "hqq(int4)", "hqq(int3)", "clip(int4)")


def measure(
    recipes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    device: str = "cpu",
    repeats: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Seconds for each of ``recipes`` and ``shapes`` (N, K): of the ``rewrite``'s search, where there is one, and of ``round``.

    Each is the median of ``repeats``, every one on another weight, behind one that is not counted: the first call on a device
    loads its libraries. Inputs are correlated and of very different sizes, as those of layers are; where no method looks at
    them there are none.
    """
    rows = []
    for n, k in shapes:
        layer_statistics = _statistics(k, device) if any(_looks_at_data(Recipe.parse(recipe)) for recipe in recipes) else None
        for recipe in recipes:
            progress(f"{recipe}, {n} x {k}")
            seconds_by_seed = [
                _once(Recipe.parse(recipe), _weight(n, k, seed, device), layer_statistics) for seed in range(repeats + 1)
            ][1:]
            found = {name: statistics.median(times[name] for times in seconds_by_seed) for name in seconds_by_seed[0]}
            rows.append({"recipe": recipe, "n": n, "k": k, **found})
    return rows


def measure_models(
    recipes: Sequence[str], models: Sequence[str], device: str = "cpu", progress: Callable[[str], None] = lambda what: None
) -> list[dict[str, Any]]:
    """Seconds that :func:`~lowbit.quantize_` takes for every weight of a model, embedding and head too, once each.

    ``models`` are names of :data:`~lowbit.evals.shapes.SHAPES`, with random weights in bfloat16; a recipe may not need data.
    The plan, the checks of every weight and the packing count, the making of the model does not. ``weights`` is how many
    numbers were quantized.
    """
    rows = []
    for name in models:
        for recipe in recipes:
            progress(f"{recipe}, {name}")
            model = random_model(name, torch.device(device), torch.bfloat16)
            start = _now(model.lm_head.weight)
            plan = quantize_(model, {"lm_head": recipe, "model.embed_tokens": recipe, "*": recipe})
            seconds = _now(next(model.buffers())) - start
            weights = sum(math.prod(layer.shape) for layer in plan.quantized)
            rows.append({"recipe": recipe, "model": name, "weights": weights, "seconds": seconds})
            del model
    return rows


def _looks_at_data(recipe: Recipe) -> bool:
    configs = (rule.config for rule in recipe.rules if rule.config is not None)
    return bool(recipe.rewrites) or any(ROUNDERS[config.rounder].needs_statistics for config in configs)


def _once(recipe: Recipe, weight: Tensor, layer_statistics: Statistics | None) -> dict[str, float]:
    """Seconds of each part for one layer."""
    config = recipe.rules[0].config
    assert config is not None
    found = {}
    for rewrite in recipe.rewrites:
        assert layer_statistics is not None
        options = {name: value for name, value in rewrite.options if name != "insert"}
        start = _now(weight)
        reader = Reader(weight.float(), config, layer_statistics, torch.arange(weight.shape[1], device=weight.device))
        pool = Pool(weight.shape[1], partial(iter, [reader]))
        choice = rewrite.method.run(pool, **options)
        found["rewrite"] = _now(weight) - start
        s = choice.divisor.to(weight.device, torch.float32)
        weight, layer_statistics = weight * s, layer_statistics.scaled(s)
    start = _now(weight)
    round_weight(weight, config, layer_statistics)
    return {**found, "round": _now(weight) - start}


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _weight(n: int, k: int, seed: int, device: str) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul_(k**-0.5).to(device, torch.bfloat16)


def _statistics(k: int, device: str) -> Statistics:
    """Of a quarter more rows than channels."""
    generator = torch.Generator().manual_seed(k)
    hidden = torch.randn(k + k // 4, k, generator=generator) * torch.logspace(0, -1.5, k)
    mixed = hidden.to(device) @ torch.randn(k, k, generator=generator).to(device) / k**0.5
    return Statistics.of(mixed * torch.exp(torch.randn(k, generator=generator)).to(device))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time methods on one layer, and on whole models.")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="with commas between")
    parser.add_argument("--models", default="", help=f"whole models to quantize, with commas between: {', '.join(SHAPES)}")
    parser.add_argument("--model-recipes", default=",".join(MODEL_RECIPES), help="with commas between; none that needs data")
    parser.add_argument("--shapes", default="4096x4096", help="N x K, with commas between")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes.split(",") if shape)]
    result = partial(print, flush=True)
    rows = measure(split_recipes(options.recipes), shapes, options.device, options.repeats, result)
    named = [name for name in options.models.split(",") if name]
    model_rows = measure_models(split_recipes(options.model_recipes), named, options.device, result)
    if options.out is not None:
        write_result(options.out, {"device": options.device, "rows": rows, "models": model_rows})
    for row in model_rows:
        print(f"{row['recipe']:64} {row['model']}: {row['weights'] / 1e9:.2f} billion weights in {row['seconds']:.1f} s")
    for row in rows:
        parts = ", ".join(f"{name} {row[name]:.3f} s" for name in ("rewrite", "round") if name in row)
        print(f"{row['recipe']:64} {row['n']} x {row['k']}: {parts}")


if __name__ == "__main__":
    main()
