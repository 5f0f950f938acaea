"""The model in the box, quantized a dozen ways and measured: the table of ``lowbit demo``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from rich.table import Table

from .evaluation import TOY, Material, Outcome, Progress, compare

__all__ = ["RECIPES", "run", "table"]

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


def run(*, limit: int | None = None, recipes: Sequence[str] = RECIPES, progress: Progress | None = None) -> Iterator[Outcome]:
    """Measure the model in the box: its own held-out text, its exam (``limit`` questions a subject), files and speed.

    Raises ``FileNotFoundError`` where the model is not there, with the command that makes it.
    """
    if not (TOY / "config.json").is_file():
        raise FileNotFoundError(f"the model in the box is not in {TOY}: make it with python -m lowbit.evals.toy.train")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TOY, dtype="auto", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(TOY, local_files_only=True)
    material = Material.read(limit=limit)
    yield from compare(lambda: copy.deepcopy(model), tokenizer, recipes, material, files=True, speed=True, progress=progress)


def table(outcomes: Sequence[Outcome], title: str = "") -> Table:
    """Outcomes as a table; columns that nothing was measured for are left out."""
    files = any(outcome.file_bytes is not None for outcome in outcomes)
    speeds = any(outcome.speed is not None for outcome in outcomes)
    made = Table(title=title or None, title_justify="left")
    made.add_column("scheme", no_wrap=True)
    for name in ("bits", *(("file MB",) if files else ()), "perplexity", "exam %", "difference, 95 %", "flips"):
        made.add_column(name, justify="right", no_wrap=name != "difference, 95 %")
    made.add_column("kernel: decode")
    made.add_column("prompt")
    for name in (*(("tok/s",) if speeds else ()), "s"):
        made.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        made.add_row(*_cells(outcome, files, speeds))
    return made


def _cells(outcome: Outcome, files: bool, speeds: bool) -> list[str]:
    d = outcome.difference
    cells = [_SHORT.get(outcome.recipe, outcome.recipe), f"{outcome.bits_per_weight:.2f}"]
    if files:
        cells.append("" if outcome.file_bytes is None else f"{outcome.file_bytes / 1e6:.2f}")
    cells += [
        f"{outcome.perplexity.value:.2f}" if outcome.perplexity.value < 1e5 else f"{outcome.perplexity.value:.1e}",
        f"{100 * outcome.answers.accuracy:.1f}",
        "" if d is None else f"{100 * d.difference:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
        "" if d is None else f"+{d.gained} -{d.lost}",
        _names(outcome.kernels["decode"]),
        _names(outcome.kernels["prompt"]),
    ]
    if speeds:
        cells.append("" if outcome.speed is None else f"{outcome.speed.tokens_per_second:.0f}")
    return [*cells, f"{outcome.seconds:.1f}"]


def _names(kernels: dict[str, int]) -> str:
    return ", ".join(sorted(kernels, key=lambda name: -kernels[name])) or "torch"
