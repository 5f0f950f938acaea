"""Figures that are kept: JSON that says where it comes from, written so that nobody reads half of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from lowbit import env

__all__ = ["origin", "replace_file", "write_result"]


def origin() -> dict[str, Any]:
    """Where figures come from: versions, machine, commit (where this is a checkout) and date."""
    here = env()
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "versions": dict(here.versions),
        "cpu": {**here.cpu},
        "gpus": [gpu["name"] for gpu in here.gpus],
    }


def _commit() -> str | None:
    try:
        asked = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def write_result(path: Path, figures: dict[str, Any]) -> None:
    """``figures`` beside their :func:`origin`, as JSON."""
    replace_file(path, json.dumps({**origin(), **figures}, indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` beside the file and rename; makes the folder if there is none. Raises ``OSError`` that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with named_errors(path), os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Within the block an ``OSError`` that names no file (a full disk) names ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise
