"""Numbers and findings in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .bars import megabytes
from .entries import Change, Entry, Runs, clean, finite

__all__ = ["NONE", "beyond_chance", "change", "figures", "lead", "number", "points", "probability", "verdict"]

NONE = "\u2013"
"""What stands where nothing was measured."""
_DIVERGENT = 0.1  # nats a token, from where on exams of enough questions show a loss (docs/quality.md)
_TOO_WIDE = 0.1  # an interval of ten points tells nothing of quantization
_LEVEL = 0.05


def number(value: Any, digits: int = 2) -> str:
    """``value`` with ``digits`` behind the point, as a power of ten where that says nothing; a dash for none."""
    if value is None:
        return NONE
    if finite(value) is None:
        return "not finite"
    if value != 0 and (abs(value) >= 1e5 or abs(value) < 10.0**-digits):
        return f"{value:.1e}".replace("-", "\u2212")
    return f"{value:,.{digits}f}".replace("-", "\u2212")


def figures(value: Any) -> str:
    """``value`` to three figures, without a power of ten down to millionths."""
    if value == 0:
        return "0"
    if finite(value) is None or not 1e-6 <= abs(value) < 1e5:
        return number(value)
    return number(value, max(0, 2 - math.floor(math.log10(abs(value)))))


def points(value: Any, sign: bool = True) -> str:
    """A share 0..1 in points of a hundred."""
    if value is None or finite(100 * value) is None:
        return NONE
    text = f"{100 * value:{'+' if sign else ''}.1f}".replace("-", "\u2212")
    return text[1:] if text in ("+0.0", "\u22120.0") else text


def probability(value: Any) -> str:
    if finite(value) is None:
        return NONE
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def beyond_chance(difference: dict[str, Any]) -> bool:
    """Whether the adjusted p is below 0.05; where there is none, the plain one; where there is none, by the interval."""
    for key in ("holm", "mcnemar"):
        if difference.get(key) is not None:
            return bool(difference[key] < _LEVEL)
    return bool(difference["low"] > 0 or difference["high"] < 0)


def in_doubt(difference: dict[str, Any]) -> bool:
    """Whether the interval by itself tells a loss, and the correction for all recipes does not."""
    return not beyond_chance(difference) and (finite(difference["high"]) or 0.0) < 0


def saving(entry: Entry, runs: Runs) -> str:
    """What a recipe's file is beside the float model's of the same run; empty where either was not written."""
    wholes = [other.outcome.get("file_bytes") for other in runs.entries if other.is_float and other.run == entry.run]
    size, float_bytes = entry.outcome.get("file_bytes"), wholes[0] if wholes else None
    if size is None or not float_bytes:
        return ""
    saved = 1 - size / float_bytes
    return f"{100 * abs(saved):.0f}\u00a0% {'smaller' if saved >= 0 else 'larger'}, {megabytes(size)}\u00a0MB"


def finding(difference: dict[str, Any], task: str) -> str:
    """What a recipe did on a task, with its interval."""
    value, interval = difference["difference"], f"[{points(difference['low'])}, {points(difference['high'])}]"
    if value == 0:
        return f"answers as many right on {task} as float does {interval}"
    return f"{'gains' if value > 0 else 'loses'} {points(abs(value), False)} points on {task} {interval}"


def verdict(entry: Entry, task: str) -> tuple[str, str, bool] | None:
    """(what happened, whether chance explains it, whether it does not); None where nothing was compared."""
    difference = entry.difference(task)
    if difference is None:
        return None
    sure = beyond_chance(difference)
    adjusted = difference.get("holm") is not None
    p = difference["holm"] if adjusted else difference.get("mcnemar")
    p_text = "" if p is None else f" ({'adjusted ' if adjusted else ''}p {'' if p < 0.001 else '= '}{probability(p)})"
    found = "beyond chance" if sure else "in doubt" if in_doubt(difference) else "within chance"
    return finding(difference, clean(task, 40)), f"{found}{p_text}", sure


def lead(runs: Runs) -> list[str]:
    """The findings of the first run that has any, in two or three sentences."""
    for run in range(len(runs.results)):
        entries = [entry for entry in runs.entries if entry.run == run]
        compared = [e for e in entries if any(e.difference(task) for task in runs.tasks)]
        if compared:
            of = f"In run {compared[0].letter}: " if compared[0].letter else ""
            first, *rest = _compared(compared, runs)
            return [of + first, *rest]
    entry = next((e for e in runs.entries if e.part("divergence").get("kl") is not None), None)
    if entry is not None:
        return [
            "No task was measured against the float model, so that nothing is said of accuracy; divergences are in the table."
        ]
    return ["Nothing was measured against the float model: the numbers below stand by themselves."]


def _compared(compared: list[Entry], runs: Runs) -> list[str]:
    def any_of(entry: Entry, holds: Callable[[dict[str, Any]], bool]) -> bool:
        return any(holds(d) for task in runs.tasks if (d := entry.difference(task)) is not None)

    lost = [e for e in compared if any_of(e, lambda d: d["difference"] < 0 and beyond_chance(d))]
    doubtful = [e for e in compared if e not in lost and any_of(e, in_doubt)]
    divergent = [e for e in compared if e not in lost and e not in doubtful and _divergence(e) > _DIVERGENT]
    without_loss = [e for e in compared if e not in lost and e not in doubtful and e not in divergent]
    if without_loss:
        best = min(without_loss, key=lambda entry: (entry.bits, -_mean(entry, runs)))
        lowest = min(d["low"] for task in runs.tasks if (d := best.difference(task)) is not None)
        possible = f" (a loss of up to {points(-lowest, False)} points is possible)" if lowest < 0 else ""
        which = (
            f"the smallest of {len(compared)} recipes that the questions cannot tell from float{possible}"
            if len(compared) > 1
            else f"one that the questions cannot tell from float{possible}"
        )
    elif divergent:
        best = min(divergent, key=_divergence)
        which = (
            f"the nearest of {len(compared)} to float by divergence"
            if len(compared) > 1
            else "within chance of float on questions"
        )
    else:
        best = max(compared, key=lambda entry: _mean(entry, runs))
        chance = "perhaps beyond chance" if doubtful else "beyond chance"
        which = (
            f"the best of {len(compared)} recipes, which all lose {chance}" if len(compared) > 1 else f"worse than float {chance}"
        )
    found = [finding(d, clean(task, 40)) for task in runs.tasks if (d := best.difference(task))]
    size = saving(best, runs)
    sentences = [
        f"{best.recipe} ({best.bits:.2f} bits) is {which}: it {' and '.join(found)}{f'; its file is {size}' if size else ''}."
    ]
    if without_loss and lost:
        sentences.append(f"Losses beyond chance: {_listed(lost)}.")
    if without_loss and doubtful:
        sentences.append(f"Losses in doubt, beyond chance only where each recipe is looked at alone: {_listed(doubtful)}.")
    if divergent:
        sentences.append(
            f"Questions cannot tell {_listed(divergent)} from float, and predictions can: "
            f"KL above {_DIVERGENT} nats a token is a loss."
        )
    if len(without_loss) == len(compared) > 1:
        sentences.append(f"None of the {len(compared)} recipes loses beyond chance.")
    needs = [d for task in runs.tasks if (d := best.difference(task)) and (finite(d.get("questions_for_one_point")) or 0) > 0]
    widest = max((d["high"] - d["low"] for task in runs.tasks if (d := best.difference(task)) is not None), default=0.0)
    if widest > _TOO_WIDE:
        sentences.insert(0, f"Too few questions to compare recipes: an interval spans {points(widest, False)} points.")
    if without_loss and needs:
        hardest = max(needs, key=lambda d: d["questions_for_one_point"])
        sentences.append(
            "Within chance is not the same as nothing lost: to tell a loss of 1 point takes about "
            f"{_rounded(hardest['questions_for_one_point'])} questions more than the {hardest['n']:,} that were asked."
        )
    return sentences


def _divergence(entry: Entry) -> float:
    """KL from the float model in nats a token; 0 where it was not measured."""
    return finite(entry.part("divergence").get("kl")) or 0.0


def _listed(entries: list[Entry]) -> str:
    return ", ".join(entry.recipe for entry in entries[:6]) + (f" and {len(entries) - 6} more" if len(entries) > 6 else "")


def _mean(entry: Entry, runs: Runs) -> float:
    found = [d["difference"] for task in runs.tasks if (d := entry.difference(task))]
    return sum(found) / len(found)


def _rounded(value: float) -> str:
    """To two figures, with commas."""
    return f"{float(f'{value:.2g}'):,.0f}"


def change(found: Change) -> dict[str, str]:
    """One row of what became of a recipe from one run to another."""
    before, after = found.before, found.after
    paired = found.paired
    cells = {
        "recipe": found.recipe,
        "runs": f"{before.letter} → {after.letter}",
        "task": "" if found.task is None else clean(found.task, 40),
    }
    if found.task is None:
        cells["accuracy"] = ""
    else:
        values = [(entry.task(found.task) or {}).get("value") for entry in (before, after)]
        cells["accuracy"] = " → ".join(points(value, False) for value in values)
    cells["paired"] = "" if paired is None else f"{points(paired.difference)} [{points(paired.low)}, {points(paired.high)}]"
    cells["flips"] = "" if paired is None else f"+{paired.gained} \u2212{paired.lost} of {paired.n:,}"
    for name, part, key in (("perplexity", "perplexity", "value"), ("tokens", "speed", "tokens_per_second")):
        values = [entry.part(part).get(key) for entry in (before, after)]
        digits = 3 if name == "perplexity" else 0
        cells[name] = "" if None in values else " → ".join(number(value, digits) for value in values)
    sizes = [entry.outcome.get("file_bytes") for entry in (before, after)]
    cells["file"] = "" if None in sizes else " → ".join(megabytes(size) for size in sizes)
    return cells
