"""What rounders leave of a small mixture of experts: the table of the mixture.

    python -m lowbit.evals.toy.train_mixture --out FOLDER
    python -m lowbit.evals.mixture --model FOLDER --out mixture.json

The material is that of ``rounders.py``: the bundled exam and held-out text, and rows of the training texts to calibrate on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .evaluation import Material
from .results import write_result
from .rounders import measure
from .tables import RESULTS, mixture_table

__all__ = ["RECIPES", "main"]

RECIPES = (
    "int4", "gptq(int4)", "awq(int4)", "int3", "clip(int3)", "gptq(int3)", "awq(int3)", "awq(gptq(int3))",
)  # fmt: skip
COMPARED = 12  # chunks of the held-out text on which predictions are compared


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure rounders on a small mixture of experts.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the mixture")
    parser.add_argument("--limit", type=int, default=40, help="exam questions a subject at most")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens to calibrate on")
    parser.add_argument("--out", type=Path, default=RESULTS / "mixture.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    material = Material.read(limit=options.limit, compared=COMPARED)

    def progress(what: str, done: int, total: int) -> None:
        print(what, done, total, end="\r", flush=True)

    rows = measure(RECIPES, material, options.rows, progress, options.model)
    result = {"limit": options.limit, "calibration_rows": options.rows, "rounders": rows}
    write_result(options.out, result)
    print(mixture_table([result]))


if __name__ == "__main__":
    main()
