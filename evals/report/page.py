"""The page: what the template is filled with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from . import wording
from .bars import median_decibels, megabytes
from .charts import Chart
from .entries import Entry, Runs, called, clean, finite
from .histograms import chosen
from .labels import short

__all__ = ["render"]

_HERE = Path(__file__).parent


def render(runs: Runs, charts: Mapping[str, Chart]) -> str:
    """The whole document. Every text of a result is escaped; what is marked safe was made here."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["breakable"] = _breakable
    shown = {name: {"wide": Markup(chart.wide), "narrow": Markup(chart.narrow)} for name, chart in charts.items()}
    models = list(dict.fromkeys(called(result) for result in runs.results))
    text = environment.get_template("page.html").render(
        style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        title=" and ".join(models),
        models=models,
        runs=[_run(runs, i) for i in range(len(runs.results))],
        speeds=[
            {"name": name, "device": clean(figures.get("device") or "unknown"), **_origin(figures)}
            for name, figures in runs.speeds
            if "versions" in figures
        ],
        several=len(runs.results) > 1,
        lead=wording.lead(runs),
        verdicts=[row for entry in runs.entries if (row := _verdict(entry, runs)) is not None],
        warnings=runs.warnings(),
        changes=[wording.change(found) for found in runs.changes()],
        rows=[_row(entry, runs) for entry in runs.entries],
        has=_measured(runs),
        charts=shown,
        decibels=[
            (f"{short(e.recipe)} {e.letter}".rstrip(), f"{m:.1f}") for e in runs.entries if (m := median_decibels(e)) is not None
        ],
        histograms=(len(chosen(runs)), sum(len(e.outcome.get("histograms") or ()) for e in runs.entries)),
        kernel_counts=[row for entry in runs.entries for row in _kernel_counts(entry)],
        subjects=_subjects(runs),
    )
    return text


def _breakable(text: str) -> Markup:
    """A name that a line may end in behind each underscore, dot or slash."""
    return Markup(re.sub(r"(?<=[_./])(?=[^\s_./])", "<wbr>", str(escape(text))))


def _run(runs: Runs, index: int) -> dict[str, Any]:
    result = runs.results[index]
    origin = result.get("origin") or {}
    cpu = origin.get("cpu") or {}
    threads = f"{cpu.get('name') or 'processor unknown'}, {cpu.get('threads') or '?'} threads"
    first = result["outcomes"][0]
    asked = [f"{clean(name)} ({task['n']:,} questions)" for name, task in (first.get("tasks") or {}).items()]
    text = first.get("perplexity") or {}
    if text.get("tokens") is not None:
        asked.append(f"perplexity ({text['tokens']:,} tokens)")
    return {
        "letter": runs.letters[index],
        "name": runs.names[index],
        "model": called(result),
        "machine": clean(", ".join([*(origin.get("gpus") or ()), threads])),
        **_origin({"date": result.get("date"), **origin}),
        "measured": "; ".join(asked) or "no task",
        "seconds": "" if finite(result.get("seconds")) is None else f"{result['seconds']:,.0f} s",
    }


def _origin(of: dict[str, Any]) -> dict[str, str]:
    """When and with what something was measured."""
    return {
        "date": clean(of.get("date") or "no date"),
        "versions": clean(", ".join(f"{name} {version}" for name, version in (of.get("versions") or {}).items())),
        "commit": clean(of.get("commit") or ""),
    }


def _verdict(entry: Entry, runs: Runs) -> dict[str, Any] | None:
    found = [judged for task in runs.tasks if (judged := wording.verdict(entry, task)) is not None]
    if not found:
        return None
    return {"label": entry.label, "bits": f"{entry.bits:.2f}", "found": found, "saving": wording.saving(entry, runs)}


def _measured(runs: Runs) -> dict[str, bool]:
    """Which columns of the table have anything in them."""
    entries = runs.entries
    compared = [entry.difference(task) for entry in entries for task in runs.tasks]
    return {
        "file": any(e.outcome.get("file_bytes") is not None for e in entries),
        "perplexity": any(e.part("perplexity") for e in entries),
        "divergence": any(e.part("divergence") for e in entries),
        "tasks": bool(runs.tasks),
        "several_tasks": len(runs.tasks) > 1,
        "difference": any(d is not None for d in compared),
        "p": any(d is not None and d.get("mcnemar") is not None for d in compared),
        "holm": any(d is not None and d.get("holm") is not None for d in compared),
        "needed": any(d is not None and d.get("questions_for_one_point") is not None for d in compared),
        "kernels": any(e.part("kernels") for e in entries),
        "speed": any(e.part("speed") for e in entries),
        "gemv": bool(runs.speeds),
    }


def _row(entry: Entry, runs: Runs) -> dict[str, Any]:
    perplexity, divergence = entry.part("perplexity"), entry.part("divergence")
    size = entry.outcome.get("file_bytes")
    agreement = divergence.get("agreement")
    return {
        "label": entry.label,
        "float": entry.is_float,
        "bits": wording.number(entry.bits),
        "file": wording.NONE if size is None else megabytes(size),
        "perplexity": wording.number(perplexity.get("value"), 3 if (finite(perplexity.get("value")) or 100) < 100 else 1),
        "kl": wording.figures(divergence.get("kl")),
        "agreement": wording.NONE if agreement is None else f"{100 * agreement:.1f}",
        "kernels": [
            ", ".join(clean(k) for k in entry.part("kernels").get(when) or ()) or "torch" for when in ("decode", "prompt")
        ],
        "speed": wording.number(entry.part("speed").get("tokens_per_second"), 0),
        "tasks": [_task(entry, name) for name in runs.tasks if entry.task(name) is not None] or [_task(entry, None)],
    }


def _task(entry: Entry, name: str | None) -> dict[str, Any]:
    found = (entry.task(name) if name is not None else None) or {}
    d = entry.difference(name) if name is not None else None
    cells = {"name": clean(name or wording.NONE, 40), "accuracy": points_of(found.get("value")), "sure": False}
    if d is None:
        return {**cells, **dict.fromkeys(("difference", "interval", "flips", "p", "holm", "needed"), "")}
    needed = finite(d.get("questions_for_one_point"))
    return {
        **cells,
        "difference": wording.points(d["difference"]),
        "interval": f"[{wording.points(d['low'])}, {wording.points(d['high'])}]",
        "flips": f"+{d['gained']} \u2212{d['lost']}",
        "p": wording.probability(d.get("mcnemar")),
        "holm": wording.probability(d.get("holm")),
        "needed": wording.NONE if needed is None else f"{needed:,.0f}",
        "sure": wording.beyond_chance(d),
    }


def points_of(value: Any) -> str:
    return wording.points(value, sign=False)


def _kernel_counts(entry: Entry) -> list[dict[str, str]]:
    decode, prompt = (entry.part("kernels").get(when) or {} for when in ("decode", "prompt"))
    return [
        {"label": entry.label, "kernel": clean(k), "decode": f"{decode.get(k, 0):,}", "prompt": f"{prompt.get(k, 0):,}"}
        for k in dict.fromkeys([*decode, *prompt])
    ]


def _subjects(runs: Runs) -> list[dict[str, Any]]:
    """For each task with subjects: a row a subject, the accuracy of every entry in it."""
    made = []
    for task in runs.tasks:
        entries_with_subjects = [e for e in runs.entries if (e.task(task) or {}).get("subjects")]
        names = list(dict.fromkeys(name for e in entries_with_subjects for name in (e.task(task) or {})["subjects"]))
        rows = [
            (clean(name), [((e.task(task) or {})["subjects"].get(name) or {}) for e in entries_with_subjects]) for name in names
        ]
        if rows:
            shown = [
                (name, max((c.get("n", 0) for c in cells), default=0), [points_of(c.get("value")) for c in cells])
                for name, cells in rows
            ]
            made.append({"task": clean(task), "labels": [e.label for e in entries_with_subjects], "rows": shown})
    return made
