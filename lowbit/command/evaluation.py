"""``lowbit eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import JsonOption, ReportOption, bar, print_json, print_table, write_report
from .model_source import DeviceOption, is_quantized, load_model, load_tokenizer, parse_recipe


def evaluate(
    model: Annotated[str | None, typer.Argument(help="A folder or a hub id; the model in the box by default.")] = None,
    recipes: Annotated[str, typer.Option("--recipes", "-r", help="Recipes with commas between; empty for none.")] = "int8,int4",
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="An exam in MMLU's layout; the toy exam by default.")
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="A text for perplexity; the toy text by default.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions a subject at most, always the same.")] = None,
    shots: Annotated[int, typer.Option(min=0, max=5, help="Solved questions before each question.")] = 0,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens in a chunk of the text.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Chunks of the text at most.")] = None,
    device: DeviceOption = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a model and its quantized versions on the same text and questions."""
    wanted = [parse_recipe(name.strip()) for name in recipes.split(",") if name.strip()]
    from lowbit.evals import demo, evaluation

    source = str(evaluation.TOY) if model is None else model
    if wanted and is_quantized(source):
        raise typer.BadParameter(f"{source} is quantized already: give its float model, or --recipes ''")
    material = evaluation.Material.read(
        data or evaluation.TOY_DATA, text or evaluation.TOY_TEXT, limit=limit, shots=shots, context=context, chunks=chunks
    )
    tokenizer = load_tokenizer(source)
    with bar() as progress:
        found = evaluation.compare(lambda: load_model(source), tokenizer, wanted, material, device=device, progress=progress)
        outcomes = list(found)
    result = {"model": source, "outcomes": [outcome.to_dict() for outcome in outcomes]}
    write_report(result, report)
    print_json(result) if json else print_table(demo.table(outcomes, source))
