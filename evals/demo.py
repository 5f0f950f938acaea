"""The bundled toy model, quantized a dozen ways and measured: the table of ``lowbit demo``, and that of the README.

    python -m lowbit.evals.demo --out demo.json

That file keeps what the table shows, and of the questions no more than their number.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .evaluation import TOY, Material, Outcome, Progress, compare
from .results import write_result
from .tables import RESULTS, demo_table
from .tasks import MMLU
from .toy import bundled

__all__ = ["RECIPES", "main", "run", "table"]

RECIPES = (
    "int8",
    "int8_dynamic_activation_int8_weight",
    "int4",
    "int4_sym",
    "int3",
    "int2",
    "fp8",
    "fp6",
    "nf4",
    "mxfp8",
    "mxfp4",
    "nvfp4",
)
# A name of 35 letters would take the room of four columns.
_SHORT = {"int8_dynamic_activation_int8_weight": "int8, x int8", "int8_dynamic_activation_int4_weight": "int4, x int8"}


def run(*, limit: int | None = None, recipes: Sequence[str] = RECIPES, progress: Progress | None = None) -> list[Outcome]:
    """Measure the bundled toy model: its own held-out text, its exam (``limit`` questions a subject), files and speed.

    Raises ``FileNotFoundError`` where the model is not there, with the command that makes it.
    """
    model, tokenizer = bundled.load(TOY)
    material = Material.read(limit=limit)
    return compare(lambda: copy.deepcopy(model), tokenizer, recipes, material, files=True, speed=True, progress=progress)


def table(outcomes: Sequence[Outcome], title: str = "") -> Table:
    """Outcomes as a table; columns that nothing was measured for are left out."""
    first = outcomes[0]
    columns: list[tuple[str, Callable[[Outcome], str]]] = [("bits", _bits)]
    if any(outcome.file_bytes is not None for outcome in outcomes):
        columns.append(("file MB", lambda o: "" if o.file_bytes is None else f"{o.file_bytes / 1e6:.2f}"))
    if first.perplexity is not None:
        columns.append(("perplexity", _perplexity))
    for task in first.tasks:
        short = "exam" if len(first.tasks) == 1 and task == MMLU else task
        columns.append((f"{short} %", lambda o, task=task: f"{100 * o.tasks[task].value:.1f}"))
        columns.append(("difference, 95 %", lambda o, task=task: _difference(o, task)))
        columns.append(("flips", lambda o, task=task: _flips(o, task)))
    if any(outcome.divergence is not None for outcome in outcomes):
        columns.append(("KL", lambda o: "" if o.divergence is None else f"{o.divergence.kl:.4f}"))
        columns.append(("same token %", lambda o: "" if o.divergence is None else f"{100 * o.divergence.agreement:.1f}"))
    last: list[tuple[str, Callable[[Outcome], str]]] = [
        ("tok/s", lambda o: "" if o.speed is None else f"{o.speed.tokens_per_second:.0f}")
    ]
    last = [*(last if any(outcome.speed is not None for outcome in outcomes) else ()), ("s", lambda o: f"{o.seconds:.1f}")]

    made = Table(title=title or None, title_justify="left")
    made.add_column("scheme", no_wrap=True)
    for name, _ in columns:
        made.add_column(name, justify="right", no_wrap=name != "difference, 95 %")
    made.add_column("kernel: decode")
    made.add_column("prompt")
    for name, _ in last:
        made.add_column(name, justify="right", no_wrap=True)
    for o in outcomes:
        kernels = [_names(o.kernels["decode"]), _names(o.kernels["prompt"])]
        made.add_row(_SHORT.get(o.recipe, o.recipe), *(cell(o) for _, cell in columns), *kernels, *(cell(o) for _, cell in last))
    return made


def _bits(outcome: Outcome) -> str:
    return f"{outcome.bits_per_weight:.2f}"


def _perplexity(outcome: Outcome) -> str:
    if outcome.perplexity is None:
        return ""
    return f"{outcome.perplexity.value:.2f}" if outcome.perplexity.value < 1e5 else f"{outcome.perplexity.value:.1e}"


def _difference(outcome: Outcome, task: str) -> str:
    d = outcome.differences.get(task)
    return "" if d is None else f"{100 * d.difference:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def _flips(outcome: Outcome, task: str) -> str:
    d = outcome.differences.get(task)
    return "" if d is None else f"+{d.gained} -{d.lost}"


def _names(kernels: Mapping[str, int]) -> str:
    return ", ".join(sorted(kernels, key=lambda name: -kernels[name])) or "torch"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the bundled toy model for the table of a document.")
    parser.add_argument("--limit", type=int, help="exam questions a subject at most")
    parser.add_argument("--out", type=Path, default=RESULTS / "demo.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    rows = [_row(outcome.to_dict()) for outcome in run(limit=options.limit)]
    found = {"limit": options.limit, "seconds": time.perf_counter() - start, "outcomes": rows}
    write_result(options.out, found)
    print(demo_table([found]))


def _row(outcome: dict[str, Any]) -> dict[str, Any]:
    """What a table is made from."""
    reused = ("recipe", "bits_per_weight", "file_bytes", "perplexity", "kernels", "speed", "seconds")
    exam = {name: outcome["tasks"][MMLU][name] for name in ("n", "value", "difference")}
    return {**{name: outcome[name] for name in reused}, "tasks": {MMLU: exam}}


if __name__ == "__main__":
    main()
