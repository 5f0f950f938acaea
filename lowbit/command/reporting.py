"""``lowbit report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .console import JsonOption, finite, note, print_json
from .paths import files_to_read, folder_to_write


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT.json ...",
            help="What lowbit eval wrote, several are compared; and lowbit bench gemv.",
            callback=files_to_read,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Where report.html and its pictures go.", callback=folder_to_write),
    ] = Path("report"),
    json: JsonOption = False,
) -> None:
    """Make one page of results, for reading and for sending: report.html, which needs no network, and PNGs beside it."""
    from lowbit.evals.report import read_files, write_report

    found, names, speeds = read_files(results)
    page = write_report(found, out, names, speeds)
    pictures = sorted(path for path in out.glob("*.png"))
    if json:
        print_json({"report": str(page), "pictures": [str(path) for path in pictures]})
    else:
        print(f"{page}, and {len(pictures)} pictures beside it")


def write_folder(found: dict[str, Any], out: Path) -> None:
    """``eval.json`` and the report of it."""
    import json

    from lowbit.evals.report import write_report
    from lowbit.evals.results import replace_file

    replace_file(out / "eval.json", json.dumps(finite(found), indent=1, allow_nan=False) + "\n")
    try:
        note(f"wrote {write_report([found], out)}")
    except ImportError as error:
        note(f"no report: {error}")
