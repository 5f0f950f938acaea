"""``lowbit tune``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .console import JsonOption, ReportOption, bar, note, print_json, print_table, write_report
from .model_source import check_model, outline, parse_recipe, usable


def tune(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or shapes: llama-3-8b, llama-3.2-1b.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A scheme, a recipe or a YAML file.")] = "int4",
    batches: Annotated[str, typer.Option(help="M, the rows of x, with commas between.")] = "1,4,16,64",
    minutes: Annotated[float, typer.Option(min=0.01, help="The most that measuring may take.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Sweeps over all copies; each figure is their median.")] = 5,
    device: Annotated[str, typer.Option(help="cuda, or cpu for Triton's interpreter.", callback=usable)] = "cuda",
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Measure which blocks Triton's kernels are the quickest with for a model's layers, and keep them for this machine."""
    from lowbit.environment import usable_device
    from lowbit.evals import tuning
    from lowbit.evals.results import origin
    from lowbit_kernels.triton import blocks, tables

    parsed = parse_recipe(recipe)
    try:
        rows = [int(size) for size in batches.split(",")]
        if min(rows) < 1:
            raise ValueError("a batch has a row")
    except ValueError:
        raise typer.BadParameter(f"batches are as in 1,16, got {batches}") from None
    import lowbit

    where = usable_device(device)

    asked = tuning.problems(lowbit.plan(_outline(model), parsed, device=where))
    if not asked:
        raise ValueError(f"recipe {recipe!r} quantizes no linear layer of {model}: there is nothing to tune")
    with bar() as progress:
        found = tuning.measure(asked, rows, where, minutes=minutes, repeats=repeats, progress=progress)
    path = tables.file_of(found["holds_for"])
    if found["blocks"]:
        tables.merge(path, found["holds_for"], found["blocks"])
        blocks.forget()
    result: dict[str, Any] = {**origin(), **found, "file": str(path) if found["blocks"] else None}
    write_report(result, report)
    if found["finished"] < found["asked"]:
        note(f"{found['finished']} of {found['asked']} cases were measured in {minutes:g} minutes: --minutes takes more")
    print_json(result) if json else print_table(tuning.table(result))
    if not json and found["blocks"]:
        print(path)


def _outline(model: str) -> Any:
    """``model`` without its numbers; shapes that lowbit knows by name need no files."""
    from lowbit.evals.shapes import SHAPES, outlined

    if model in SHAPES:
        return outlined(model)
    check_model(model)
    return outline(model)
