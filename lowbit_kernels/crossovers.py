"""Crossover points between rows of the registry, measured by a script, one file for each GPU.

A table is a list of entries, each for one scheme, layout and shape: ``up_to`` holds (M, row) pairs with rising M; the row of the
first pair whose M is not below the call's is the fastest; an M of None stands for all larger ones. A call uses the entry of its
own scheme (else format, else bits) with the nearest shape. A GPU without a table uses that of another GPU of its architecture;
where there is none, the registry's order decides.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lowbit.scheme import Scheme

__all__ = ["FOLDER", "Crossovers", "Entry", "fastest", "file_of", "load"]

FOLDER = Path(__file__).parent / "measured"


@dataclass(frozen=True)
class Entry:
    op: str
    scheme: str
    layout: str
    n: int
    k: int
    up_to: tuple[tuple[int | None, str], ...]

    def row(self, m: int) -> str | None:
        return next((row for most, row in self.up_to if most is None or m <= most), None)


@dataclass(frozen=True)
class Crossovers:
    """``device``: the GPU's name as torch gives it; ``arch``: 90 for an H200."""

    device: str
    arch: int
    entries: tuple[Entry, ...]

    def fastest(self, op: str, scheme: Scheme, layout: str, m: int, n: int, k: int) -> str | None:
        """Name of the fastest row for such a call; None where nothing similar was measured."""
        alike = [entry for entry in self.entries if entry.op == op and entry.layout == layout]
        nearest = min(alike, key=lambda entry: _distance(entry, scheme, n, k), default=None)
        if nearest is None or Scheme.parse(nearest.scheme).bits != scheme.bits:
            return None
        return nearest.row(m)


def fastest(op: str, arch: int, scheme: Scheme, layout: str, m: int, n: int, k: int) -> str | None:
    """The name of the row that was the fastest for such a call on the current GPU or its like; None: nothing was measured.

    ``arch``: that of the device that the call is on, 0 for a CPU.
    """
    if arch == 0 or not torch.cuda.is_available():
        return None
    table = load(torch.cuda.get_device_name(), arch)
    return None if table is None else table.fastest(op, scheme, layout, m, n, k)


def _distance(entry: Entry, scheme: Scheme, n: int, k: int) -> tuple[int, int, float, str]:
    """Sort key: scheme first, then number of weights and aspect ratio."""
    theirs = Scheme.parse(entry.scheme)
    unlike = (theirs != scheme) + (theirs.format != scheme.format) + 4 * (theirs.bits != scheme.bits)
    group = 0 if theirs.group_size == scheme.group_size else 1
    n, k = max(n, 1), max(k, 1)
    size, ratio = math.log2(entry.n * entry.k / (n * k)), math.log2(entry.n * k / (entry.k * n))
    return unlike, group, abs(size) + abs(ratio) / 2, entry.scheme


def file_of(device: str) -> Path:
    """The file of the GPU that torch calls ``device``."""
    return FOLDER / (re.sub(r"\W+", "_", device.lower()).strip("_") + ".json")


@lru_cache(maxsize=16)
def load(device: str, arch: int) -> Crossovers | None:
    """The table of a GPU, or of one of the same architecture; None where there is neither."""
    own = file_of(device)
    if own.is_file():
        return _read(own)
    tables = (_read(path) for path in sorted(FOLDER.glob("*.json")))
    return next((table for table in tables if table.arch == arch), None)


def _read(path: Path) -> Crossovers:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    entries = (
        Entry(e["op"], e["scheme"], e["layout"], e["n"], e["k"], tuple((most, row) for most, row in e["up_to"]))
        for e in data["entries"]
    )
    return Crossovers(data["device"], data["arch"], tuple(entries))
