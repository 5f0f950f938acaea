"""What a benchmark leaves behind: JSON with a row a line, CSV, and a drawing."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from .results import replace_file

__all__ = ["as_csv", "as_json", "draw", "write", "write_json"]

_COLUMNS = (
    "scheme", "kernel", "contract", "layout", "m", "n", "k", "bytes", "us", "pdl", "billion_weights_per_second", "limit_us",
    "fraction_of_limit", "no_pdl_us", "no_pdl_limit_us", "no_pdl_fraction_of_limit", "float_us", "times_float",
)  # fmt: skip


def write(folder: Path, name: str, figures: dict[str, Any]) -> bool:
    """``name.json``, ``name.csv`` and ``name.png`` in ``folder``; False where the drawing is missing, for want of matplotlib."""
    write_json(folder, name, figures)
    replace_file(folder / f"{name}.csv", as_csv(figures))
    return draw(folder / f"{name}.png", figures)


def write_json(folder: Path, name: str, figures: dict[str, Any]) -> None:
    replace_file(folder / f"{name}.json", as_json(figures))


def as_json(figures: dict[str, Any]) -> str:
    """JSON in which each row of a list of rows takes a line, so that a change of figures can be read in a diff."""
    fields = []
    for key, value in figures.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in value)
            fields.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def as_csv(figures: dict[str, Any]) -> str:
    """Every row, the peers' behind the others: their name in ``scheme`` and their version in ``kernel``."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in figures["rows"]:
        writer.writerow(_rounded(row))
    for row in figures.get("peers", ()):
        writer.writerow(_rounded({**row, "scheme": row["peer"], "kernel": row["version"]}))
    return out.getvalue()


def draw(path: Path, figures: dict[str, Any]) -> bool:
    """Weights loaded per second against shape, one panel for each M, the limit of each scheme behind its line.

    False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows, peers = figures["rows"], figures.get("peers", [])
    batches = sorted({row["m"] for row in rows})
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    names = list(dict.fromkeys(row["scheme"] for row in rows))
    columns = min(3, len(batches))
    lines = -(-len(batches) // columns)
    figure = Figure(figsize=(1.5 + 5.5 * columns, 1 + 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    held = "cold" if figures.get("cold", True) else "warm"
    figure.suptitle(f"Weights loaded per second: {figures['device']}, {figures['dtype']} x, weights {held}")
    for place, m in enumerate(batches):
        axes = figure.add_subplot(lines, columns, place + 1, title=f"M = {m}", yscale="log")
        for index, name in enumerate(names):
            rows_by_shape = {(row["n"], row["k"]): row for row in rows if row["scheme"] == name and row["m"] == m}
            found = [(shapes.index(shape), row) for shape, row in rows_by_shape.items()]
            color, at = _color(index, len(names), name), [where for where, _ in found]
            speeds = [row["billion_weights_per_second"] for _, row in found]
            limits = [row["n"] * row["k"] / row["limit_us"] / 1e3 for _, row in found]
            axes.plot(at, speeds, marker="o", markersize=3, color=color, label=name)
            axes.plot(at, limits, linestyle=":", linewidth=0.8, color=color)
        for index, name in enumerate(dict.fromkeys(row["peer"] for row in peers)):
            peer_rows = [row for row in peers if row["peer"] == name and row["m"] == m and (row["n"], row["k"]) in shapes]
            at = [shapes.index((row["n"], row["k"])) for row in peer_rows]
            marks = [row["billion_weights_per_second"] for row in peer_rows]
            axes.scatter(at, marks, marker="x+1234v"[index % 7], color="black", s=36, linewidths=1, label=name)
        axes.set_xticks(range(len(shapes)), [f"{n}x{k}" for n, k in shapes], rotation=45, ha="right", fontsize=7)
        axes.set_ylabel("billion weights / s (dotted: the limit)")
        axes.grid(which="major", linewidth=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    return True


def _color(index: int, count: int, name: str) -> Any:
    from matplotlib import colormaps

    return "black" if name == "float" else colormaps["turbo"](index / max(count - 1, 1))
