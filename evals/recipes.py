"""What each bundled recipe costs the bundled toy model: the table of recipes.

    python -m lowbit.evals.recipes --out recipes.json

A recipe's first line of comment says when to pick it.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowbit import plan

from .evaluation import TOY, Material, compare
from .results import origin, write_result
from .rounders import calibration
from .tables import RESULTS, recipes_table
from .tasks import MMLU
from .toy import bundled

__all__ = ["FOLDER", "main", "measure", "names", "when"]

FOLDER = Path(__file__).resolve().parent.parent / "recipes"
"""The bundled recipes: beside this package, in a checkout as in an installation."""


MIXTURES = ("mixture_of_experts",)
"""Recipes for mixtures of experts, which are measured on one."""


def names() -> list[str]:
    """Of all bundled recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def when(name: str) -> str:
    """When to pick the recipe ``name``, in its own words. Raises ``ValueError`` for a recipe that does not say."""
    first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    if not first.startswith("# ") or not first.endswith("."):
        raise ValueError(f"the recipe {name} must begin with a comment that says when to pick it, got {first!r:.80}")
    return first[2:-1]


def measure(
    recipes: Sequence[str],
    material: Material,
    rows: int = 128,
    progress: Callable[[str, int, int], None] | None = None,
    folder: Path = TOY,
) -> list[dict[str, Any]]:
    """The model of ``folder``, the bundled toy model by default, as it is and by each of ``recipes``: a row each, from many bits
    a weight to few.

    Recipes that look at data see ``rows`` rows of :func:`~lowbit.evals.rounders.calibration`. Raises ``ValueError`` for a recipe
    of which a rule quantizes nothing in this model.
    """
    model, tokenizer = bundled.load(folder)
    for recipe in recipes:
        if idle := [note for note in plan(model, recipe).notes if note.startswith("pattern ")]:
            raise ValueError(f"{recipe} cannot be measured on {folder}: {idle[0]}")
    data = calibration(tokenizer, rows)
    found = compare(lambda: copy.deepcopy(model), tokenizer, recipes, material, calibration=data, files=True, progress=progress)
    return _sorted([_row(outcome.to_dict()) for outcome in found])


def _sorted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The float model, then from large to small."""
    return sorted(rows, key=lambda row: (row["recipe"] != "float", -row["file_bytes"], row["recipe"]))


def _row(outcome: dict[str, Any]) -> dict[str, Any]:
    reused = {name: outcome[name] for name in ("recipe", "bits_per_weight", "file_bytes", "perplexity")}
    exam = {name: outcome["tasks"][MMLU][name] for name in ("n", "value", "difference")}
    return {**reused, "exam": exam, "when": "" if outcome["recipe"] == "float" else when(outcome["recipe"])}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure every bundled recipe on the bundled toy model.")
    parser.add_argument("--limit", type=int, help="exam questions a subject at most")
    parser.add_argument("--recipes", help="these, with commas between, beside the rows that the file holds; all anew by default")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens to calibrate on")
    parser.add_argument("--out", type=Path, default=RESULTS / "recipes.json", help="JSON file to write")
    parser.add_argument("--mixture", type=Path, help="measure recipes for mixtures on the model of this folder, and no other")
    options = parser.parse_args(arguments)
    reused = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"recipes": []}
    if options.mixture is not None:
        rows = measure(MIXTURES, Material.read(limit=options.limit), options.rows, folder=options.mixture)
        write_result(options.out, {**reused, "mixtures": {**origin(), "limit": options.limit, "recipes": rows}})
        return
    asked = options.recipes.split(",") if options.recipes else [name for name in names() if name not in MIXTURES]
    if found := sorted(set(asked) & set(MIXTURES)):
        raise SystemExit(f"{', '.join(found)}: give --mixture the folder of one (evals/toy/train_mixture.py makes it)")
    rows = measure(asked, Material.read(limit=options.limit), options.rows)
    if options.recipes:
        if reused["limit"] != options.limit:
            raise SystemExit(f"{options.out} holds figures of --limit {reused['limit']}: give the same")
        known = {row["recipe"] for row in rows}
        rows = _sorted([*rows, *(row for row in reused["recipes"] if row["recipe"] not in known and row["recipe"] in names())])
    result = {"limit": options.limit, "recipes": rows, "mixtures": reused.get("mixtures", {"recipes": []})}
    write_result(options.out, result)
    print(recipes_table([result]))


if __name__ == "__main__":
    main()
