"""``lowbit demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .console import JsonOption, ReportOption, bar, print_json, print_table, write_report
from .model_source import quiet_transformers
from .paths import folder_to_write
from .reporting import write_folder


def demo(
    limit: Annotated[int | None, typer.Option(min=1, help="Exam questions a subject at most; all by default.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Results and a report.", callback=folder_to_write)
    ] = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Quantize the bundled toy model with a dozen schemes and measure each, in a few minutes on a CPU."""
    quiet_transformers()
    from lowbit.evals import demo as demonstration
    from lowbit.evals import gemv
    from lowbit.evals.evaluation import result

    start = time.perf_counter()
    with bar() as progress:
        outcomes = demonstration.run(limit=limit, progress=progress)
        recipes, layers = [outcome.recipe for outcome in outcomes[1:]], [layer for o in outcomes for layer in o.layers]
        asked = out is not None or report is not None  # the table has no room for it
        speeds = gemv.decode_speeds(recipes, gemv.largest(layers), "cpu", progress) if asked else None
    seconds = time.perf_counter() - start
    found = result("the bundled toy model", outcomes, seconds, speeds)
    write_report(found, report)
    if out is not None:
        write_folder(found, out)
    if json:
        print_json(found)
        return
    questions, tokens = outcomes[0].tasks["mmlu"].n, outcomes[0].perplexity.tokens
    print_table(demonstration.table(outcomes))
    print(f"{questions} exam questions (intervals: Tango's, paired), {tokens:,} held-out tokens, {seconds:.0f} s")
