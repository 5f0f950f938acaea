"""``lowbit report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import JsonOption, print_json


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json ...", help="What lowbit eval wrote; several are compared.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where report.html and its pictures go.")] = Path(
        "report"
    ),
    json: JsonOption = False,
) -> None:
    """Make one page of results, for reading and for sending: report.html, which needs no network, and PNGs beside it."""
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file: give a folder with --out")
    from lowbit.evals.report import read_result, write_report

    found = [read_result(path) for path in results]
    page = write_report(found, out, [path.name for path in results])
    pictures = sorted(path for path in out.glob("*.png"))
    if json:
        print_json({"report": str(page), "pictures": [str(path) for path in pictures]})
    else:
        print(f"{page}, and {len(pictures)} pictures beside it")
