"""What mixed precision is worth, on the bundled toy model: KL beside the straight line between two schemes of one method.

    python -m lowbit.evals.mixed --out mixed.json

Layers are measured on texts like those that the model was trained on, each choice on the held-out text.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import Calibration, allocate, quantize_, sensitivity

from .divergence import Reference, divergence
from .evaluation import TOY, TOY_TEXT
from .perplexity import context_of, windows_of
from .results import write_result
from .rounders import calibration
from .tables import RESULTS, mixed_table
from .toy import bundled

__all__ = ["BUDGETS", "METHODS", "main", "measure"]

METHODS = (("int3", "int4"), ("gptq(int3)", "gptq(int4)"))
BUDGETS = (3.5, 3.7, 4.0)
Progress = Callable[[str, int, int], None]


def measure(
    model: nn.Module,
    data: Calibration,
    chunks: Tensor,
    methods: Sequence[tuple[str, str]] = METHODS,
    budgets: Sequence[float] = BUDGETS,
    *,
    batches: int = 2,
    compared: int = 30,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Each pair of schemes of ``methods`` alone and mixed within ``budgets`` of bits a weight: a row each.

    ``data`` is what layers are measured on, and what rounders look at; ``chunks`` [chunks, length] what each choice is. A row
    holds ``"method"``, ``"bits_per_weight"``, ``"kl"`` and its ``"kl_low"`` and ``"kl_high"``, ``"line"`` (what a mixture in
    these proportions of the two alone would have), ``"expected"`` (the sum of the layers' own KL) and ``"layers"``, how many took
    each scheme. ``batches`` of the data, on which the KL of layers is measured, and ``compared`` chunks for that of models.
    """
    rows: list[dict[str, Any]] = []
    with Reference.collect(model, chunks, limit=compared) as reference:
        for small, large in methods:
            found = sensitivity(model, data, [small, large], compared=batches, progress=progress)
            names = [layer.name for layer in found.layers]
            mappings = [dict.fromkeys(names, small), dict.fromkeys(names, large)]
            mappings += [allocate(found, budget) for budget in budgets]
            ends: list[tuple[float, float]] = []
            for mapping in mappings:
                bits = found.bits_per_weight(mapping)
                mixed = copy.deepcopy(model)
                quantize_(mixed, mapping, calibration=data)
                far = divergence(mixed, reference)
                ends.append((bits, far.kl))
                (low, kl_low), (high, kl_high) = ends[0], ends[min(1, len(ends) - 1)]
                line = far.kl if len(ends) < 3 else kl_low + (kl_high - kl_low) * (bits - low) / (high - low)
                counts = {scheme: list(mapping.values()).count(scheme) for scheme in (small, large)}
                rows.append(
                    {
                        "method": f"{small} and {large}", "layers": counts, "bits_per_weight": bits, "kl": far.kl,
                        "kl_low": far.kl_low, "kl_high": far.kl_high, "line": line, "expected": found.total(mapping),
                    }
                )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure mixed precision on the bundled toy model, or on one in a folder.")
    parser.add_argument("--model", type=Path, default=TOY, help="a folder")
    parser.add_argument("--text", type=Path, default=TOY_TEXT, help="that choices are measured on")
    parser.add_argument("--calibration", type=Path, help="that layers are measured on; of the bundled toy model its own texts")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens to calibrate on")
    parser.add_argument("--methods", default=";".join(map(",".join, METHODS)), help="pairs of schemes: int3,int4;gptq(int3),...")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="bits a weight, with commas between")
    parser.add_argument("--batches", type=int, default=2, help="batches of the calibration for the KL of layers")
    parser.add_argument("--compared", type=int, default=30, help="chunks of the text for the KL of models")
    parser.add_argument("--out", type=Path, default=RESULTS / "mixed.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.calibration is None and options.model != TOY:
        parser.error("a model of your own needs --calibration FILE")
    model, tokenizer = bundled.load(options.model)
    if options.calibration is None:
        data = calibration(tokenizer, options.rows)
    else:
        data = Calibration(options.calibration, rows=options.rows, length=context_of(model), tokenizer=tokenizer)
    chunks: torch.Tensor = windows_of(tokenizer, options.text.read_text(encoding="utf-8"), context_of(model))
    methods = [(small, large) for small, large in (pair.split(",") for pair in options.methods.split(";"))]
    budgets = [float(bits) for bits in options.budgets.split(",")]
    rows = measure(model, data, chunks, methods, budgets, batches=options.batches, compared=options.compared)
    name = "toy model" if options.model == TOY else options.model.name
    write_result(options.out, {"model": name, "calibration_rows": options.rows, "mixed": rows})
    print(mixed_table([{"model": name, "mixed": rows}]))


if __name__ == "__main__":
    main()
