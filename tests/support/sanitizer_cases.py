"""A small case of each kernel of a GPU, for compute-sanitizer, which pytest's own threads and caches would slow down:

    compute-sanitizer --tool racecheck python -m tests.support.sanitizer_cases [--each format] [ROW ...]

runs the least case of each row (``--each format``: of each format that a row takes), holds it to the row's contract and ends
with 1 if one is missed. ROW: the beginning of a row's name.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from tests.lowbit_kernels.test_kernels import FORMS, activations, linear_cases, test_linear, test_quantized_linear

TESTS = {
    test_linear: lambda: linear_cases("linear"),
    test_quantized_linear: lambda: linear_cases("quantized_linear", FORMS[:-1], activation=activations, static=(False, True)),
}


def least(each: str, names: list[str]) -> list[tuple[Any, Any]]:
    """(test, parameters) of the case with the fewest products for each kernel that is asked for."""
    found: dict[Any, tuple[float, Any, Any]] = {}
    for test, cases in TESTS.items():
        for param in cases():
            run, scheme, case = param.values
            if run.device != "cuda" or not (run.row.name or "").startswith(tuple(names)) or run.row.available():
                continue
            size = case["m"] * case["n"] * case["k"] if min(case["m"], case["n"], case["k"]) > 1 else float("inf")
            key = (run.row.name, scheme.format if each == "format" else None, case["m"] > 64)
            if key not in found or size < found[key][0]:
                found[key] = (size, test, param)
    return [(test, param) for _, test, param in found.values()]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("rows", nargs="*", default=["cuda"])
    options.add_argument("--each", choices=("row", "format"), default="row")
    given = options.parse_args()
    failed = 0
    cases = least(given.each, given.rows)
    for test, param in cases:
        start = time.perf_counter()
        try:
            test(*param.values)
            said = "ok"
        except AssertionError as error:
            said, failed = f"FAILED: {error}", failed + 1
        print(f"{time.perf_counter() - start:6.1f} s {param.id}: {said}", flush=True)
    print(f"{len(cases)} cases, {failed} failed")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    raise SystemExit(main())
