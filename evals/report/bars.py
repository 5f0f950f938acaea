"""Charts of bars: bytes by what they hold, signal over noise by layer, calls by kernel, speeds beside the limit."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .drawing import ACCENT, FILL, INK, LINE, MUTED, PAPER, SOFT, canvas, legend
from .entries import Entry, Runs, clean, finite
from .labels import short, tail

__all__ = ["layers", "sizes", "speeds"]

_ROW = 22  # pixels of a bar with the room around it
_PARTS = (("codes", ACCENT, "codes"), ("scales", SOFT, "scales, zero points"), ("float", FILL, "left in float"))


def sizes(runs: Runs, width: int) -> Figure | None:
    """Bytes of codes, of scales and of what stayed in float, one bar a recipe."""
    entries = [entry for entry in runs.entries if sum(entry.part("size").values())]
    if not entries:
        return None
    figure = canvas(width, 64 + _ROW * len(entries))
    axes = figure.add_subplot()
    totals = [sum(entry.part("size")[part] for part, _, _ in _PARTS) for entry in entries]
    _rows(axes, [_label(entry, width) for entry in entries])
    left = [0.0] * len(entries)
    for part, color, words in _PARTS:
        held = [entry.part("size")[part] / 1e6 for entry in entries]
        axes.barh(range(len(entries)), held, left=left, height=0.56, color=color, label=words)
        left = [a + b for a, b in zip(left, held, strict=True)]
    wholes = {entry.run: total for entry, total in zip(entries, totals, strict=True) if entry.is_float}
    for y, (entry, total) in enumerate(zip(entries, totals, strict=True)):
        share = f" · {100 * total / wholes[entry.run]:.0f} %" if entry.run in wholes and not entry.is_float else ""
        _write_beside(axes, total / 1e6, y, f"{megabytes(total)} MB{share}")
    axes.set_xlim(0, max(totals) / 1e6 * (1.16 if width > 500 else 1.5))
    _hide_scale(axes)
    legend(figure, axes.containers)
    return figure


def megabytes(size: float) -> str:
    """``size`` bytes in MB, to three figures or whole."""
    return f"{size / 1e6:,.2f}" if size < 1e8 else f"{size / 1e6:,.0f}"


def layers(runs: Runs, width: int) -> Figure | None:
    """A panel for each recipe with a bar for each layer, in the model's order: its signal over quantization noise."""
    entries = [entry for entry in runs.entries if _decibels(entry)]
    if not entries:
        return None
    names = list(dict.fromkeys(layer["name"] for entry in entries for layer in entry.outcome["layers"]))
    columns = 1 if width < 500 else 2
    lines = -(-len(entries) // columns)
    figure = canvas(width, 30 + 96 * lines)
    every = [value for entry in entries for value in _decibels(entry).values()]
    bottom, top = min(0.0, *every), max(1.0, *every)
    for i, entry in enumerate(entries):
        axes = figure.add_subplot(lines, columns, i + 1)
        found = _decibels(entry)
        worst = min(found, key=lambda name: found[name])
        at = [names.index(name) for name in found]
        colors = [INK if name == worst else ACCENT for name in found]
        axes.bar(at, list(found.values()), width=0.72 if len(names) < 120 else 1.0, color=colors)
        axes.set_xlim(-0.8, len(names) - 0.2)
        axes.set_ylim(bottom, top * 1.04)
        axes.grid(axis="y")
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.set_yticks([tick for tick in (-20, 0, 20, 40, 60, 80) if bottom <= tick <= top * 1.04])
        axes.set_title(_label(entry, width), pad=4)
        label = f"lowest {found[worst]:.1f} dB: {tail(clean(worst), 30 if width > 500 else 24)}"
        axes.set_title(label, loc="right", pad=4, fontsize=9, color=MUTED, fontweight="normal")
        if i % columns == 0:
            axes.set_ylabel("dB")
        if i // columns == lines - 1:
            axes.set_xlabel(f"{len(names)} layers in the model's order", fontsize=10)
    return figure


def _decibels(entry: Entry) -> dict[str, float]:
    """Signal over noise by layer; a layer without any noise has none."""
    found = {layer["name"]: finite(layer.get("sqnr_db")) for layer in entry.outcome.get("layers") or ()}
    return {name: value for name, value in found.items() if value is not None}


def median_decibels(entry: Entry) -> float | None:
    """Of its layers."""
    found = _decibels(entry)
    return statistics.median(found.values()) if found else None


def speeds(runs: Runs, width: int) -> Figure | None:
    """Tokens per second of each recipe; weights per second of each kernel beside the time that reading its bytes takes."""
    tokens = [(entry, finite(entry.part("speed").get("tokens_per_second"))) for entry in runs.entries]
    tokens = [(entry, value) for entry, value in tokens if value]
    devices = [figures.get("device") for _, figures in runs.speeds]
    panels = [
        panel
        for name, figures in runs.speeds
        for panel in _gemv_panels(name if devices.count(figures.get("device")) > 1 else "", figures)
    ]
    if not tokens and not panels:
        return None
    heights = [52 + _ROW * len(tokens)] * bool(tokens) + [66 + 16 * (width < 500) + _ROW * len(rows) for _, rows in panels]
    figure = canvas(width, sum(heights))
    places = iter(figure.add_gridspec(len(heights), 1, height_ratios=heights))
    if tokens:
        axes = figure.add_subplot(next(places))
        axes.set_title("Tokens per second, one sequence")
        _rows(axes, [_label(entry, width) for entry, _ in tokens])
        axes.barh(range(len(tokens)), [value for _, value in tokens], height=0.56,
                  color=[FILL if entry.is_float else ACCENT for entry, _ in tokens])  # fmt: skip
        for y, (_, value) in enumerate(tokens):
            _write_beside(axes, value, y, _rate(value))
        axes.set_xlim(0, max(value for _, value in tokens) * (1.12 if width > 500 else 1.25))
        _hide_scale(axes)
    for title, rows in panels:
        _gemv(figure.add_subplot(next(places)), title, rows, width)
    return figure


def _gemv_panels(name: str, figures: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The largest weight at up to three numbers of rows of x, as (title, rows); ``name`` tells one device's from each other."""
    rows = [row for row in figures["rows"] if row["billion_weights_per_second"] > 0 and row["limit_us"] > 0]
    if not rows:
        return []
    n, k = max(((row["n"], row["k"]) for row in rows), key=lambda shape: (shape[0] * shape[1], shape))
    here = [row for row in rows if (row["n"], row["k"]) == (n, k)]
    where = ", ".join(part for part in (short(clean(figures.get("device") or ""), 26), short(name, 16)) if part)
    return [
        (f"M = {m}, {n} x {k}: {where}", [row for row in here if row["m"] == m]) for m in sorted({row["m"] for row in here})[:3]
    ]


def _gemv(axes: Any, title: str, rows: list[dict[str, Any]], width: int) -> None:
    axes.set_title(title if width > 500 else title.replace(": ", "\n", 1))
    _rows(axes, [short(clean(row["scheme"]), 22 if width > 500 else 15) for row in rows])
    axes.set_xscale("log")
    got = [row["billion_weights_per_second"] for row in rows]
    limits = [row["n"] * row["k"] / row["limit_us"] / 1e3 for row in rows]
    axes.hlines(range(len(rows)), got, limits, color=LINE, linewidth=3, zorder=1)
    axes.scatter(limits, range(len(rows)), marker="|", s=130, color=INK, linewidths=1.8, zorder=3, label="reading its bytes")
    dots = [FILL if row["scheme"] == "float" else ACCENT for row in rows]
    axes.scatter(got, range(len(rows)), s=40, color=dots, edgecolors=[MUTED if dot == FILL else PAPER for dot in dots], zorder=4)
    for y, (row, limit, reached) in enumerate(zip(rows, limits, got, strict=True)):
        _write_beside(
            axes, max(limit, reached), y, f"{_rate(reached)}, {row['fraction_of_limit']:.0%} of the limit".replace("%", " %"), 9
        )
    low, high = min(*got, *limits), max(*got, *limits)
    axes.set_xlim(low / 1.4, high * (high / low) ** (0.3 if width > 500 else 1.1) * (1.9 if width > 500 else 3.5))
    steps = (1, 3) if width > 500 else (1,)
    ticks = [step * 10**power for power in range(-4, 7) for step in steps if low / 1.3 <= step * 10**power <= high * 1.1]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="x")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("billion weights a second; the bar across: reading their bytes and nothing else", fontsize=9.5, loc="left")
    if width < 500:
        axes.set_xlabel("billion weights a second; bar: the limit", fontsize=9.5, loc="left")


def _rate(value: float) -> str:
    """To three figures, or whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _label(entry: Entry, width: int) -> str:
    return f"{short(entry.recipe, 24 if width > 500 else 15)} {entry.letter}".rstrip()


def _rows(axes: Any, names: list[str]) -> None:
    """A row for each name, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(length=0)
    for text in axes.get_yticklabels():
        text.set_color(INK)


def _write_beside(axes: Any, x: float, y: float, words: str, size: float = 9.5) -> None:
    """``words`` right of ``x`` in row ``y``."""
    axes.annotate(words, (x, y), xytext=(6, 0), textcoords="offset points", va="center_baseline", fontsize=size, color=MUTED)


def _hide_scale(axes: Any) -> None:
    """No scale: each bar says its number."""
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
