"""How commands speak: results to stdout as text or JSON, progress bars to stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from .paths import file_to_write

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["JsonOption", "ReportOption", "bar", "finite", "note", "print_json", "print_table", "say", "silence", "write_report"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else there.")]


ReportOption = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write the JSON to this file.", callback=file_to_write)
]

# Wider than any table: where nothing says how wide the page is, a name that is cut is worse than a long line.
_PAGE = 1000


def print_json(data: Any) -> None:
    """``data`` to stdout; numbers that JSON lacks (NaN, infinity) become null."""
    print(_dumped(data))


def write_report(data: Any, path: Path | None) -> None:
    """``data`` to the file ``path``, if there is one; whole, or not at all."""
    if path is not None:
        from lowbit.evals.results import replace_file

        replace_file(path, _dumped(data) + "\n")


def _dumped(data: Any) -> str:
    return json.dumps(finite(data), indent=2, allow_nan=False)


def finite(data: Any) -> Any:
    """``data`` with null for the numbers that JSON lacks."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(table: Table) -> None:
    """A table to stdout: as wide as the terminal, or as it wants to be where there is none."""
    from rich.console import Console

    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PAGE)
    console.print(table)


def note(text: str) -> None:
    """A remark to stderr."""
    say(f"lowbit: {text}")


def say(line: str) -> None:
    """A line to stderr; work goes on where nobody takes it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Let go what ``stream`` holds and whatever follows: Python flushes it as it exits, and would complain once more."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


class Lines:
    """Progress in a log: a line where a block of a model begins, and every :data:`EVERY` seconds within what takes longer."""

    EVERY = 30.0

    def __init__(self) -> None:
        self._block: str | None = None
        self._said = self._began = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say, where it is time to, that ``what`` is being done, and that ``done`` of ``total`` are."""
        now, found = time.monotonic(), re.match(r".*?\.\d+(?=\.)", what)
        block = self._block if found is None else found[0]
        if block == self._block and now - self._said < self.EVERY:
            return
        self._block, self._said = block, now
        say(f"{what}, {done} of {total}, {now - self._began:.0f} s")


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr while the block runs: call what it gives with (what is being done, done, in all).

    Where stderr is no terminal, a line for each block of a model and for what takes longer than half a minute.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)  # the one of now: what libraries write to stderr in the meantime may be caught
    if not console.is_terminal:
        yield Lines()
        return
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
