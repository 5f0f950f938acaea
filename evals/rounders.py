"""What each rounder recovers of what round-to-nearest loses, on the bundled toy model: the table of rounders.

    python -m lowbit.evals.rounders --out rounders.json

Those that look at data see one edition of the texts that the model was trained on, in other words than the exam and the
held-out text.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowbit import Calibration

from .evaluation import TOY, Material, compare
from .results import write_result
from .tables import RESULTS, rounders_table
from .tasks import MMLU
from .toy import bundled
from .toy.corpus import SEPARATOR, edition
from .toy.world import build

__all__ = ["RECIPES", "calibration", "main", "measure"]

_WAYS = ("{}", "hqq({})", "clip({})", "gptq({})")
_MORE = ("awq({})", "{damped}", "awq({damped})", "rotation({damped})", "{aimed}")
_BOTH = ("awq({aimed})", "rotation({aimed})")
# More damping spares the questions of a model this small: found on questions that the exam does not ask.
_DAMPED = "gptq({}, damping=0.5, passes=10)"
_AIMED = "gptq({}, damping=0.5, passes=10, asymmetric=true)"
RECIPES = tuple(
    way.format(scheme, damped=_DAMPED.format(scheme), aimed=_AIMED.format(scheme))
    for scheme, ways in {"int4": _WAYS, "int3": (*_WAYS, *_MORE, *_BOTH), "int2": (*_WAYS, *_MORE)}.items()
    for way in ways
)
_OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")  # commas that part recipes, and not options as in gptq(int3, damping=0.02)
_COMPARED = 30  # chunks of the held-out text on which predictions are compared


def calibration(tokenizer: Any, rows: int = 128, length: int = 512) -> Calibration:
    """``rows`` rows of ``length`` tokens from texts like those that the bundled toy model was trained on."""
    documents = edition(build(), 0)
    ids = tokenizer(SEPARATOR.join(documents), add_special_tokens=False, verbose=False)["input_ids"]
    cut = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)][:rows]
    return Calibration(cut, rows=rows)


def measure(
    recipes: Sequence[str],
    material: Material,
    rows: int = 128,
    progress: Callable[[str, int, int], None] | None = None,
    folder: Path = TOY,
) -> list[dict[str, Any]]:
    """The model of ``folder``, the bundled toy model by default, as it is and by each of ``recipes``, calibrated on ``rows``
    rows: a row each, in this order."""
    model, tokenizer = bundled.load(folder)
    data = calibration(tokenizer, rows)
    found = compare(lambda: copy.deepcopy(model), tokenizer, recipes, material, calibration=data, progress=progress)
    return [_row(outcome.to_dict()) for outcome in found]


def _row(outcome: dict[str, Any]) -> dict[str, Any]:
    reused = {name: outcome[name] for name in ("recipe", "bits_per_weight", "perplexity", "divergence")}
    return {**reused, "exam": {name: outcome["tasks"][MMLU][name] for name in ("n", "value", "difference")}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure every rounder on the bundled toy model.")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="with commas between")
    parser.add_argument("--limit", type=int, help="exam questions a subject at most")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens to calibrate on")
    parser.add_argument("--keep", action="store_true", help="measure only what the file does not hold, and keep the rest")
    parser.add_argument("--out", type=Path, default=RESULTS / "rounders.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    recipes = [recipe.strip() for recipe in _OUTSIDE_BRACKETS.split(options.recipes)]
    reused = json.loads(options.out.read_text(encoding="utf-8"))["rounders"] if options.keep else []
    there = {row["recipe"]: row for row in reused}
    material = Material.read(limit=options.limit, compared=_COMPARED)
    found = measure([recipe for recipe in recipes if recipe not in there], material, options.rows)
    there.update({row["recipe"]: row for row in found})
    rows = [there[recipe] for recipe in ("float", *recipes)]
    write_result(options.out, {"limit": options.limit, "calibration_rows": options.rows, "rounders": rows})
    print(rounders_table([{"rounders": rows}]))


if __name__ == "__main__":
    main()
