"""``lowbit demo``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .console import JsonOption, ReportOption, bar, print_json, print_table, write_report
from .model_source import quiet_transformers


def demo(
    limit: Annotated[int | None, typer.Option(min=1, help="Exam questions a subject at most; all by default.")] = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Quantize the model in the box with a dozen schemes and measure each, in a few minutes on a CPU."""
    quiet_transformers()
    from lowbit.evals import demo as demonstration
    from lowbit.evals.evaluation import result

    start = time.perf_counter()
    with bar() as progress:
        outcomes = demonstration.run(limit=limit, progress=progress)
    seconds = time.perf_counter() - start
    found = result("the model in the box", outcomes, seconds)
    write_report(found, report)
    if json:
        print_json(found)
        return
    questions, tokens = outcomes[0].tasks["mmlu"].n, outcomes[0].perplexity.tokens
    print_table(demonstration.table(outcomes))
    print(f"{questions} exam questions (intervals: Tango's, paired), {tokens:,} held-out tokens, {seconds:.0f} s")
