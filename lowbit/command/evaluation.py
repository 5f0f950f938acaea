"""``lowbit eval``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .calibrating import CalibrationOption, LengthOption, RowsOption, check_calibration, read_calibration
from .console import JsonOption, ReportOption, bar, note, print_json, print_table, write_report
from .model_source import DeviceOption, check_model, checked_kind, load_model, load_tokenizer, parse_recipe
from .paths import file_to_read, folder_to_write
from .reporting import write_folder

_PERPLEXITY = "perplexity"
_WIKITEXT = "wikitext"


def evaluate(
    model: Annotated[str | None, typer.Argument(help="A folder or a hub id; the bundled toy model by default.")] = None,
    recipes: Annotated[str, typer.Option("--recipes", "-r", help="Recipes with commas between; empty for none.")] = "int8,int4",
    tasks: Annotated[
        str,
        typer.Option(help="perplexity, mmlu, mmlu_stem, mmlu_anatomy, hellaswag, ...: lm-eval's names, with commas between."),
    ] = "mmlu,perplexity",
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Rows of the tasks: MMLU's own layout, TASK.jsonl or TASK.parquet; else the hub."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text for perplexity; wikitext: of the hub; the toy model has one.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions a task (of MMLU: a subject) at most, the first.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, max=5, help="Solved questions before each; the task's own number.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens in a chunk of the text.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens between chunks that overlap; the context by default.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Chunks of the text at most.")] = None,
    divergence: Annotated[int, typer.Option(min=0, help="Chunks on which predictions are compared, token by token.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of a task at a time, as lm-eval's --batch_size.")] = 16,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time decoding, and each recipe's weights against the limit of reading them.")
    ] = False,
    calibration: CalibrationOption = None,
    rows: RowsOption = 128,
    length: LengthOption = None,
    dtype: Annotated[str | None, typer.Option(help="Of the float model: float32, bfloat16, float16; that of its files.")] = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Results, a report, and what a second run goes on from.",
            callback=folder_to_write,
        ),
    ] = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a model and its quantized versions on the same questions and text, and say whether differences are chance."""
    from lowbit.recipe import split_recipes

    wanted = [parse_recipe(name) for name in split_recipes(recipes) if name]
    check_calibration(wanted, calibration)
    asked = [name.strip() for name in tasks.split(",") if name.strip()]
    if not asked:
        raise typer.BadParameter("--tasks names no task: try --tasks mmlu,perplexity")
    convert = _conversion(dtype)
    if data is not None and not data.is_dir():
        raise typer.BadParameter(f"no folder {data} with rows of the tasks")
    if text is not None and str(text) != _WIKITEXT:
        file_to_read(text)
    from lowbit.evals import demo, evaluation, gemv
    from lowbit.evals.tasks import UnknownTaskError
    from lowbit.evals.toy import bundled

    if model is None:
        bundled.check()
    source = str(evaluation.TOY) if model is None else model
    check_model(source, floats=bool(wanted))
    boxed = model is None
    if _PERPLEXITY in asked and text is None and not boxed:
        raise typer.BadParameter("perplexity needs a text: give one with --text FILE, or leave perplexity out of --tasks")
    start = time.perf_counter()
    with bar() as progress:
        progress("reading the tasks", 0, 1)
        try:
            material = evaluation.Material.read(
                evaluation.TOY_DATA if data is None and boxed else data,
                (text or evaluation.TOY_TEXT) if _PERPLEXITY in asked else None,
                tasks=[name for name in asked if name != _PERPLEXITY],
                limit=limit, shots=shots, context=context, stride=stride, chunks=chunks, batch=batch_size, compared=divergence,
            )  # fmt: skip
        except UnknownTaskError as error:
            raise typer.BadParameter(str(error)) from None
        tokenizer, kind = load_tokenizer(source), checked_kind(source)
        outcomes = evaluation.compare(
            lambda: convert(load_model(source, kind=kind)), tokenizer, wanted, material,
            calibration=read_calibration(source, calibration, rows, length), files=out is not None, speed=speed, device=device,
            cache=None if out is None else out / "cache", harness=None if out is None else out / "lm-eval", progress=progress,
        )  # fmt: skip
        layers = [layer for outcome in outcomes for layer in outcome.layers]
        speeds = gemv.decode_speeds(wanted, gemv.largest(layers), device or "cpu", progress) if speed else None
    found = evaluation.result(source, outcomes, time.perf_counter() - start, speeds)
    write_report(found, report)
    if out is not None:
        write_folder(found, out)
    for failure in speeds["failures"] if speeds else ():
        note(" ".join(f"{key}={value}" for key, value in failure.items()))
    for outcome in outcomes:
        for remark in outcome.notes:
            note(f"{outcome.recipe}: {remark}")
    if cut := max(outcome.shortened for outcome in outcomes):
        note(f"{cut} prompts were cut at their beginning to fit the model's context: fewer --shots spare them that")
    print_json(found) if json else print_table(demo.table(outcomes, source))


def _conversion(dtype: str | None) -> Callable[[Any], Any]:
    if dtype is None:
        return lambda model: model
    import torch

    found = getattr(torch, dtype, None)
    if dtype not in ("float32", "bfloat16", "float16") or found is None:
        raise typer.BadParameter(f"--dtype must be float32, bfloat16 or float16, got {dtype}")
    return lambda model: model.to(found)
