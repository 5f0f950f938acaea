"""How many rows of inputs a rounder has to see, on the bundled toy model: the table of few rows.

    python -m lowbit.evals.few_rows --out few_rows.json

Feed-forward layers are rounded with statistics of a few rows of what they read, and their error is measured on other rows, beside
that of rounding to nearest with searched ranges, which sees none. Where it is below 1 looking at data pays: this is what
``lowbit.algorithms.Rounder.rows_per_channel`` is set by.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import QTensor, Scheme
from lowbit.algorithms import ROUNDERS
from lowbit.statistics import Statistics

from .results import write_result
from .rounders import calibration
from .tables import RESULTS, few_rows_table
from .toy import bundled

__all__ = ["SHARES", "main", "measure"]

SHARES = (1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0)
"""Rows for each channel."""
SCHEMES = ("int4", "int3")


def inputs(layers: Sequence[str], rows: int) -> tuple[dict[str, nn.Linear], dict[str, Tensor]]:
    """``layers`` of the toy model, and what each reads [tokens, K] of ``rows`` rows of text, in a random order."""
    model, tokenizer = bundled.load(dtype=torch.float32)
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    modules = {name: model.get_submodule(name) for name in layers}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda m, args, name=name: found[name].append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in calibration(tokenizer, rows).batches(model):
            model(*batch.args, **batch.kwargs)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.cat(pieces) for name, pieces in found.items()}
    return modules, {name: x[torch.randperm(len(x), generator=generator)] for name, x in whole.items()}


def measure(layers: Sequence[str], rows: int) -> list[dict[str, Any]]:
    """A row for each rounder and scheme: for each of :data:`SHARES` the mean over ``layers``, in logarithms, of its error divided
    by that of rounding to nearest, and the largest of them."""
    modules, read = inputs(layers, rows)
    found = []
    for rounder in ("gptq", "clip"):
        for name in SCHEMES:
            scheme = Scheme.parse(name)
            ratios: list[list[float]] = [[] for _ in SHARES]
            for layer, x in read.items():
                weight = modules[layer].weight.detach()
                others = Statistics.of(x[len(x) // 2 :])
                nearest = others.output_error(weight, QTensor.quantize(weight, scheme, method="mse").dequantize())
                for i, share in enumerate(SHARES):
                    statistics = Statistics.of(x[: math.ceil(share * weight.shape[1])])
                    codes, scales, _ = ROUNDERS[rounder].round(weight, scheme, statistics)
                    error = others.output_error(weight, QTensor.from_codes(codes, scales, scheme, torch.float32).dequantize())
                    ratios[i].append(error / nearest)
            means = [math.exp(sum(map(math.log, each)) / len(each)) for each in ratios]
            found.append({"rounder": rounder, "scheme": name, "means": means, "largest": [max(each) for each in ratios]})
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure how many rows of inputs rounders have to see.")
    parser.add_argument("--rows", type=int, default=48, help="rows of 512 tokens; half of them measure the error")
    parser.add_argument("--out", type=Path, default=RESULTS / "few_rows.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    layers = [f"model.layers.{i}.mlp.{name}" for i in range(6) for name in ("gate_proj", "up_proj", "down_proj")]
    result = {"shares": list(SHARES), "layers": len(layers), "rows": measure(layers, options.rows)}
    write_result(options.out, result)
    print(few_rows_table([result]))


if __name__ == "__main__":
    main()
