"""Rows of JSONL and parquet files, read so that a bad one is named with its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["ENDINGS", "RowsError", "find", "lines_of", "read_rows"]

ENDINGS = (".jsonl", ".parquet")
_LONGEST = 16 << 20  # characters of a line: longer ones are no questions, and would take all memory


class RowsError(ValueError):
    """A file of rows that cannot be read; the message names the file and the row."""


def find(folder: Path, stem: str, endings: Sequence[str] = ENDINGS) -> Path | None:
    """``folder/stem`` with the first of ``endings`` that is there."""
    return next((path for ending in endings if (path := folder / f"{stem}{ending}").is_file()), None)


def lines_of(file: TextIO) -> Iterator[str]:
    """The lines of ``file``; ``ValueError`` for one that is too long to be anything but a mistake."""
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST and not line.endswith("\n"):
            raise ValueError(f"a line is longer than {_LONGEST >> 20} MiB")
        yield line


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``.jsonl`` or ``.parquet`` file; :class:`RowsError` names the file and the row that cannot be read."""
    rows: list[dict[str, Any]] = []
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        with path.open(encoding="utf-8-sig") as file:
            for line in lines_of(file):
                if line.strip():
                    rows.append(_row(line))
    except OSError as error:
        raise RowsError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # pyarrow's errors and wrong encodings are such too
        where = "" if path.suffix == ".parquet" else f", row {len(rows) + 1}"
        raise RowsError(f"{path}{where}: {error}") from None
    return rows


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object with named fields, got {line.strip()[:40]}")
    return row
