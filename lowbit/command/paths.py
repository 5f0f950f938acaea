"""Files and folders that a command line names: one that is absent or of the wrong kind is a mistake there (exit code 2)."""

from __future__ import annotations

import os
from pathlib import Path

import typer

__all__ = ["file_to_read", "file_to_write", "files_to_read", "folder_to_write"]


def file_to_read(path: Path | None) -> Path | None:
    """``path``, which has to be a file."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: give a file")
    if path is not None and not path.exists():
        raise typer.BadParameter(f"no file {path}")
    return path


def files_to_read(paths: list[Path]) -> list[Path]:
    """``paths``, each of which has to be a file."""
    for path in paths:
        file_to_read(path)
    return paths


def file_to_write(path: Path | None) -> Path | None:
    """``path``, in a folder that takes files: what cannot be written is said before the work of hours, not behind it."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        why = "is a folder" if path.is_dir() else f"cannot be written: {path.parent} is no folder that takes files"
        raise typer.BadParameter(f"{path} {why}")
    return path


def folder_to_write(path: Path | None) -> Path | None:
    """``path``, a folder that takes files, or that can be made."""
    if path is not None and path.is_file():
        raise typer.BadParameter(f"{path} is a file: give a folder")
    if path is not None:
        above = next(found for found in (path.absolute(), *path.absolute().parents) if found.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written: {above} is no folder that takes files")
    return path
