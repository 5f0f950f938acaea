"""What each method wins back of the answers that round-to-nearest loses, on questions enough to tell methods apart.

    python -m lowbit.evals.further --out further.json

The exam of the model in the box has 1,920 questions, whose intervals are as wide as methods are apart. These are five times as
many, about all other facts of its world. Settings of methods may be chosen on them; the exam then judges, and is not looked at.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .evaluation import TOY, Material, compare
from .results import write_result
from .rounders import RECIPES, calibration
from .tables import RESULTS, further_table
from .tasks import MMLU, suite_of
from .toy.corpus import further
from .toy.world import build

__all__ = ["main", "measure"]

SCHEME = "int3"


def measure(
    recipes: Sequence[str], rows: int = 128, limit: int | None = None, progress: Callable[[str, int, int], None] | None = None
) -> list[dict[str, Any]]:
    """The model in the box as it is and by each of ``recipes``, the first of which is round-to-nearest: a row each.

    A row holds ``"recipe"``, ``"n"`` questions (``limit`` at most, evenly from all), ``"value"``, ``"difference"`` from the float
    model, and ``"won_back"``, the share of what the first recipe loses that it does not lose.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TOY, dtype="auto", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(TOY, local_files_only=True)
    questions = further(build())
    chosen = questions if limit is None else questions[:: -(-len(questions) // limit)]
    material = Material(suite_of(chosen), None, batch=64)
    data = calibration(tokenizer, rows)
    found = compare(lambda: copy.deepcopy(model), tokenizer, recipes, material, calibration=data, progress=progress)
    lost = -found[1].differences[MMLU].difference
    return [_row(outcome.to_dict(), lost) for outcome in found]


def _row(outcome: dict[str, Any], lost: float) -> dict[str, Any]:
    exam = {name: outcome["tasks"][MMLU][name] for name in ("n", "value", "difference")}
    apart = exam["difference"]
    back = None if apart is None or not lost else 1 + apart["difference"] / lost
    return {"recipe": outcome["recipe"], "bits_per_weight": outcome["bits_per_weight"], **exam, "won_back": back}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ask the model in the box about all facts that its exam does not ask.")
    parser.add_argument("--limit", type=int, help="questions at most, evenly from all")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens to calibrate on")
    parser.add_argument("--out", type=Path, default=RESULTS / "further.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    recipes = [recipe for recipe in RECIPES if SCHEME in recipe]
    rows = measure(recipes, options.rows, options.limit)
    write_result(options.out, {"limit": options.limit, "calibration_rows": options.rows, "further": rows})
    print(further_table([{"further": rows}]))


if __name__ == "__main__":
    main()
