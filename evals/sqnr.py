"""What each scheme costs: bits a weight, and signal over quantization noise on two kinds of weights.

    python -m lowbit.evals.sqnr --out sqnr.json --readme README.md

Round to nearest, a fixed seed, no model: Gaussian weights are what initialisation and most trained layers look like,
Student's t with 4 degrees of freedom stands for layers with outliers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.scheme import SCHEMES
from lowbit.tensor import QTensor

__all__ = ["Row", "main", "measure", "rewritten", "table"]

N, K, SEED = 512, 4096, 0
DEGREES = 4
BEGIN, END = "<!-- sqnr:begin -->", "<!-- sqnr:end -->"


class Row(NamedTuple):
    """A scheme by name and spelling, stored bits a weight, and decibels on both kinds of weights."""

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


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| scheme | bits a weight | Gaussian, dB | heavy-tailed, dB |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| `{r.name}` | {r.bits_per_weight:.3f} | {r.gaussian_db:.1f} | {r.heavy_tailed_db:.1f} |" for r in rows]
    return "\n".join(lines)


def rewritten(text: str, block: str) -> str:
    """``text`` with ``block`` between the two marks. Raises ``ValueError`` where it does not hold each of them once."""
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"{mark} must stand in the file once, found {text.count(mark)} times")
    before, rest = text.split(BEGIN)
    if END not in rest:
        raise ValueError(f"{BEGIN} must stand before {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def replace_file(path: Path, text: str) -> None:
    """Write beside the file and rename, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bits a weight and signal over quantization noise of every named scheme.")
    parser.add_argument("--out", type=Path, default=Path("evals/results/sqnr.json"), help="JSON file to write")
    parser.add_argument("--readme", type=Path, help=f"file whose lines between {BEGIN} and {END} become the table")
    options = parser.parse_args(arguments)
    readme = None if options.readme is None else options.readme.read_text(encoding="utf-8")
    if readme is not None:
        rewritten(readme, "")  # marks that are missing are reported before the work
    rows = measure()
    setup = {"rows": N, "columns": K, "seed": SEED, "heavy_tailed": f"Student's t, {DEGREES} degrees of freedom"}
    result = {**setup, "schemes": [row._asdict() for row in rows]}
    replace_file(options.out, json.dumps(result, indent=1) + "\n")
    if readme is not None:
        replace_file(options.readme, rewritten(readme, table(rows)))
    print(table(rows))


if __name__ == "__main__":
    main()
