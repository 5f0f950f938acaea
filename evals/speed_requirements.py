"""What the kernels of a GPU or of a CPU must reach, held against figures that were measured.

    python -m lowbit.evals.speed_requirements evals/results/gemv_h200.json

prints each bar with what was reached, and ends with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

__all__ = ["Requirement", "requirements", "table"]

_BIG, _BIGGER, _SMALL = (8192, 8192), (28672, 8192), (4096, 4096)
_W8A8 = "int8_dynamic_activation_int8_weight"
_FRACTIONS = ("int3", "int5", "int6", "fp6", "fp6_e3m2", "mxfp4", "mxfp6", "mxfp8", "nvfp4")
_BATCHED = ("int4", "int3", "fp6", "mxfp4")
_W4A8 = "int8_dynamic_activation_int4_weight"
_IN_FLOATS = ("fp6", "mxfp4", "mxfp6", "mxfp8", "nf4")  # on a CPU those that floats are compared with


class Requirement(NamedTuple):
    """``measured`` None: the figures do not say."""

    label: str
    minimum: float
    measured: float | None

    @property
    def passed(self) -> bool:
        return self.measured is not None and self.measured >= self.minimum


def requirements(figures: dict[str, Any]) -> list[Requirement]:
    """Every bar of the device that figures are of, and on a CPU of cold or warm weights, whichever they are."""
    if str(figures.get("device", "")).startswith("cpu"):
        return [*(_cold_on_cpu(figures) if figures.get("cold", True) else _warm_on_cpu(figures))]
    return [*_one_row(figures), *_few_rows(figures), *_against_float(figures)]


def _find(figures: dict[str, Any], scheme: str, shape: tuple[int, int], m: int) -> dict[str, Any] | None:
    return next((r for r in figures["rows"] if r["scheme"] == scheme and (r["n"], r["k"]) == shape and r["m"] == m), None)


def _best_peer(figures: dict[str, Any], bits: int, shape: tuple[int, int], plain: bool) -> float | None:
    """Microseconds of the fastest peer of as many bits at M = 1."""
    field = "no_pdl_us" if plain else "us"
    found = [r[field] for r in figures.get("peers", ()) if r["bits"] == bits and (r["n"], r["k"]) == shape and r["m"] == 1]
    return min(found, default=None)


def _one_row(figures: dict[str, Any]) -> Iterator[Requirement]:
    eight = [("int8", 8, _BIG, 0.90, 1.25, False), ("int8", 8, _BIGGER, 0.90, 1.15, False)]
    four = [
        (name, 4, *limits)
        for name in ("int4", "int4_sym")
        for limits in (
            (_BIG, 0.85, 2.0, False), (_BIG, 0.85, 1.8, True), (_BIGGER, 0.90, 1.75, False), (_BIGGER, 0.90, 1.65, True),
            (_SMALL, 0.60, 2.0, False),
        )
    ]  # fmt: skip
    for scheme, bits, shape, fraction, times, plain in (*eight, *four):
        row = _find(figures, scheme, shape, 1)
        mode = ", no early starts" if plain else ""
        where = f"{scheme}, M = 1, {shape[0]}x{shape[1]}{mode}"
        yield Requirement(
            f"{where}: of the limit", fraction, row and row["no_pdl_fraction_of_limit" if plain else "fraction_of_limit"]
        )
        peer = _best_peer(figures, bits, shape, plain)
        measured_us = row and row["no_pdl_us" if plain else "us"]
        yield Requirement(f"{where}: times the best peer", times, peer / measured_us if peer and measured_us else None)
    for scheme in _FRACTIONS:
        row = _find(figures, scheme, _BIG, 1)
        yield Requirement(f"{scheme}, M = 1, 8192x8192: of the limit", 0.75, row and row["fraction_of_limit"])


def _few_rows(figures: dict[str, Any]) -> Iterator[Requirement]:
    for scheme in ("int4", "int4_sym"):
        for shape in (_BIG, _BIGGER):
            one, eight = _find(figures, scheme, shape, 1), _find(figures, scheme, shape, 8)
            measured = one["us"] / eight["us"] if one and eight else None
            yield Requirement(f"{scheme}, M = 8, {shape[0]}x{shape[1]}: of its speed at M = 1", 0.80, measured)
    for scheme in _BATCHED:
        for m, minimum in ((16, 2.0), (64, 1.5)):
            row = _find(figures, scheme, _BIG, m)
            yield Requirement(f"{scheme}, M = {m}, 8192x8192: times F.linear", minimum, row and row["times_float"])
    row = _find(figures, _W8A8, _BIG, 2048)
    yield Requirement("int8 times int8, M = 2048, 8192x8192: times F.linear", 1.5, row and row["times_float"])


def _against_float(figures: dict[str, Any]) -> Iterator[Requirement]:
    """Up to 128 rows of x and above."""
    for low, high, minimum in ((1, 128, 1.0), (129, 4096, 0.85)):
        yield from _worst(figures, low, high, minimum)


def _worst(figures: dict[str, Any], low: int, high: int, minimum: float) -> Iterator[Requirement]:
    """The worst of each scheme over all shapes."""
    for scheme in dict.fromkeys(r["scheme"] for r in figures["rows"] if r["scheme"] != "float"):
        found = [r for r in figures["rows"] if r["scheme"] == scheme and low <= r["m"] <= high]
        worst = min(found, key=lambda r: r["times_float"], default=None)
        where = "" if worst is None else f" (at M = {worst['m']}, {worst['n']}x{worst['k']})"
        measured = worst and worst["times_float"]
        yield Requirement(f"{scheme}, M = {low} to {high}, the worst shape{where}: times F.linear", minimum, measured)


def _cold_on_cpu(figures: dict[str, Any]) -> Iterator[Requirement]:
    """One row of x: against the memory, torch's own kernels and floats. Many rows: against floats, all schemes that are there."""
    for shape in ((4096, 4096), (11008, 4096)):

        def us(scheme: str, at: tuple[int, int] = shape) -> float | None:
            row = _find(figures, scheme, at, 1)
            return row and row["us"]

        for scheme, bits, fraction, times in (("int4", 4, 0.85, 1.1), ("int8", 8, 0.88, 1.0), (_W4A8, None, 0.90, None)):
            row, where = _find(figures, scheme, shape, 1), f"{scheme}, M = 1, {shape[0]}x{shape[1]}"
            yield Requirement(f"{where}: of the limit", fraction, row and row["fraction_of_limit"])
            if bits is not None and times is not None:
                peer = _best_peer(figures, bits, shape, plain=False)
                yield Requirement(f"{where}: times torch's", times, peer / row["us"] if peer and row else None)
        three, four = us("int3"), us("int4")
        yield Requirement(f"int3, M = 1, {shape[0]}x{shape[1]}: times int4", 1.0, four / three if four and three else None)
        for scheme, minimum in (("int4", 3.0), *((name, 1.8) for name in _IN_FLOATS)):
            row = _find(figures, scheme, shape, 1)
            yield Requirement(f"{scheme}, M = 1, {shape[0]}x{shape[1]}: times F.linear", minimum, row and row["times_float"])
    if any(row["m"] > 64 for row in figures["rows"]):
        yield from _worst(figures, 65, 4096, 0.95)


def _warm_on_cpu(figures: dict[str, Any]) -> Iterator[Requirement]:
    peer = _best_peer(figures, 4, _SMALL, plain=False)
    for scheme, minimum in (("int4", 1.5), (_W4A8, 2.2)):
        row = _find(figures, scheme, _SMALL, 1)
        yield Requirement(
            f"{scheme}, M = 1, 4096x4096, warm: times torch's int4", minimum, peer / row["us"] if peer and row else None
        )


def table(found: list[Requirement]) -> Table:
    made = Table(title=f"{sum(limits.passed for limits in found)} of {len(found)} bars reached", title_justify="left")
    for name in ("bar", "at least", "reached", "", "by"):
        made.add_column(name, justify="left" if name in ("bar", "") else "right", no_wrap=True)
    for limits in found:
        if limits.measured is None:
            made.add_row(limits.label, f"{limits.minimum:.2f}", "", "not measured", "")
            continue
        word = "[green]pass[/]" if limits.passed else "[red]miss[/]"
        made.add_row(
            limits.label,
            f"{limits.minimum:.2f}",
            f"{limits.measured:.3f}",
            word,
            f"{100 * (limits.measured / limits.minimum - 1):+.1f} %",
        )
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hold figures of lowbit bench gemv against what the kernels must reach.")
    parser.add_argument("figures", type=Path)
    options = parser.parse_args(arguments)
    found = requirements(json.loads(options.figures.read_text(encoding="utf-8")))
    Console(highlight=False, width=160).print(table(found))
    raise SystemExit(not all(limits.passed for limits in found))


if __name__ == "__main__":
    main()
