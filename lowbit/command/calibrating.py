"""What recipes that look at data run on: the options that commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .model_source import load_tokenizer

if TYPE_CHECKING:
    from lowbit import Calibration, Recipe

__all__ = ["CalibrationOption", "LengthOption", "RowsOption", "check_calibration", "read_calibration"]

CalibrationOption = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="A text that the model runs on, for recipes that look at data."),
]
RowsOption = Annotated[int, typer.Option(min=1, help="Rows of that text to take.")]
LengthOption = Annotated[int | None, typer.Option(min=1, help="Tokens in a row; by default as many as the model takes.")]


def check_calibration(recipes: Sequence[Recipe], calibration: Path | None) -> None:
    """Refuse before anything is loaded what would fail behind it."""
    needs = next((recipe.needs_data for recipe in recipes if recipe.needs_data), "")
    if calibration is None and needs:
        raise typer.BadParameter(f"{needs} looks at data: give a text with --calibration FILE")
    if calibration is not None and not calibration.is_file():
        raise typer.BadParameter(f"no text file {calibration} to calibrate on")


def read_calibration(model: str, path: Path | None, rows: int, length: int | None) -> Calibration | None:
    """The text in the file ``path`` as data for ``model``."""
    if path is None:
        return None
    from lowbit import Calibration

    return Calibration(path, rows=rows, length=length, tokenizer=load_tokenizer(model))
