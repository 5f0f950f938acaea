"""What each scheme costs: bits a weight, and signal over quantization noise on two kinds of weights.

    python -m lowbit.evals.sqnr --out sqnr.json

Round to nearest, a fixed seed, no model: Gaussian weights are what initialisation and most trained layers look like,
Student's t with 4 degrees of freedom stands for layers with outliers.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.scheme import SCHEMES
from lowbit.tensor import QTensor

from .results import write_result
from .tables import RESULTS, sqnr_table

__all__ = ["Row", "main", "measure"]

N, K, SEED = 512, 4096, 0
DEGREES = 4


class Row(NamedTuple):
    """A scheme by its two names, stored bits a weight, and decibels on both kinds of weights."""

    name: str
    scheme: str
    bits_per_weight: float
    gaussian_db: float
    heavy_tailed_db: float


def draw(n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gaussian and heavy-tailed weights [n, k], float32: t is a normal over the root of a mean of squared normals."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(1 + DEGREES, n, k, generator=generator, dtype=torch.float64)
    return normal[0].float(), (normal[0] / normal[1:].square().mean(0).sqrt()).float()


def decibels(w: Tensor, scheme: str) -> float:
    """10 log10 of the energy of ``w`` over that of its rounding error, to three decimals: sums differ beyond them."""
    error = QTensor.quantize(w, scheme).dequantize(torch.float64) - w
    return round(10 * math.log10(float(w.double().square().sum() / error.square().sum())), 3)


def measure(n: int = N, k: int = K, seed: int = SEED) -> list[Row]:
    """A row for each named scheme, from many bits a weight to few."""
    gaussian, heavy = draw(n, k, seed)
    rows = [
        Row(name, str(scheme), round(scheme.bits_per_weight(k), 4), decibels(gaussian, str(scheme)), decibels(heavy, str(scheme)))
        for name, scheme in SCHEMES.items()
    ]
    return sorted(rows, key=lambda row: (-row.bits_per_weight, row.name))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bits a weight and signal over quantization noise of every named scheme.")
    parser.add_argument("--out", type=Path, default=RESULTS / "sqnr.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    setup = {"rows": N, "columns": K, "seed": SEED, "heavy_tailed": f"Student's t, {DEGREES} degrees of freedom"}
    result = {**setup, "schemes": [row._asdict() for row in measure()]}
    write_result(options.out, result)
    print(sqnr_table([result]))


if __name__ == "__main__":
    main()
