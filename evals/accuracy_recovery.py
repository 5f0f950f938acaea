"""What each method recovers of the answers that round-to-nearest loses, on questions enough to tell methods apart.

    python -m lowbit.evals.accuracy_recovery --out accuracy_recovery.json

The exam of the bundled toy model has 1,920 questions, whose intervals are as wide as methods are apart. These are five times as
many, about all other facts of its world. Settings of methods may be chosen on them; the exam then judges, and is not looked at.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .evaluation import Material, compare
from .results import write_result
from .rounders import RECIPES, calibration
from .tables import RESULTS, accuracy_recovery_table
from .tasks import MMLU, suite_of
from .toy import bundled
from .toy.corpus import accuracy_questions
from .toy.world import build

__all__ = ["main", "measure"]

SCHEME = "int3"


def measure(
    recipes: Sequence[str], rows: int = 128, limit: int | None = None, progress: Callable[[str, int, int], None] | None = None
) -> list[dict[str, Any]]:
    """The bundled toy model as it is and by each of ``recipes``: a row each.

    A row holds ``"recipe"``, ``"n"`` questions (``limit`` at most, evenly from all), ``"value"`` and ``"difference"`` from the
    float model.
    """
    model, tokenizer = bundled.load()
    questions = accuracy_questions(build())
    chosen = questions if limit is None else questions[:: -(-len(questions) // limit)]
    material = Material(suite_of(chosen), None, batch=64)
    data = calibration(tokenizer, rows)
    found = compare(lambda: copy.deepcopy(model), tokenizer, recipes, material, calibration=data, progress=progress)
    return [_row(outcome.to_dict()) for outcome in found]


def _row(outcome: dict[str, Any]) -> dict[str, Any]:
    exam = {name: outcome["tasks"][MMLU][name] for name in ("n", "value", "difference")}
    return {"recipe": outcome["recipe"], "bits_per_weight": outcome["bits_per_weight"], **exam}


def _with_shares(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` with ``"recovered"``: the share of what round-to-nearest, behind the float model, loses that is not lost."""
    lost = -rows[1]["difference"]["difference"]

    def share(row: dict[str, Any]) -> float | None:
        return None if row["difference"] is None or not lost else 1 + row["difference"]["difference"] / lost

    return [{**row, "recovered": share(row)} for row in rows]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ask the bundled toy model about all facts that its exam does not ask.")
    parser.add_argument("--limit", type=int, help="questions at most, evenly from all")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens to calibrate on")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy_recovery.json", help="JSON file to write")
    parser.add_argument("--keep", action="store_true", help="measure only what the file does not hold, and keep the rest")
    options = parser.parse_args(arguments)
    recipes = [recipe for recipe in RECIPES if SCHEME in recipe]
    earlier_rows = json.loads(options.out.read_text(encoding="utf-8"))["accuracy_recovery"] if options.keep else []
    there = {row["recipe"]: row for row in earlier_rows}
    found = measure([recipe for recipe in recipes if recipe not in there], options.rows, options.limit)
    there.update({row["recipe"]: row for row in found})
    rows = _with_shares([there[recipe] for recipe in ("float", *recipes)])
    write_result(options.out, {"limit": options.limit, "calibration_rows": options.rows, "accuracy_recovery": rows})
    print(accuracy_recovery_table([{"accuracy_recovery": rows}]))


if __name__ == "__main__":
    main()
