"""The toy model as the repository holds it: a wheel has the code beside it, but neither the model nor its exam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["TOY", "TOY_DATA", "TOY_TEXT", "check", "load"]

TOY = Path(__file__).parent / "model"
"""The toy model."""
TOY_DATA = Path(__file__).parent / "data"
"""Its exam: ``dev/SUBJECT_dev.csv`` and ``test/SUBJECT_test.csv``."""
TOY_TEXT = TOY_DATA / "heldout.txt"
"""Text of its world that it was not trained on."""


def check(folder: Path | None = None) -> None:
    """Raises ``FileNotFoundError`` where ``folder``, that of the toy model by default, has none, and says what has it."""
    folder = TOY if folder is None else folder
    if (folder / "config.json").is_file():
        return
    if folder != TOY:
        raise FileNotFoundError(f"no model in {folder}: config.json is not there")
    raise FileNotFoundError(
        f"the toy model is not in {folder}: wheels leave it out, the repository and the sdist have it (make demo); "
        "lowbit eval MODEL measures a model of your own"
    )


def load(folder: Path | None = None, dtype: Any = "auto") -> tuple[Any, Any]:
    """The float model and the tokenizer of ``folder``, the toy model by default. Raises as :func:`check`."""
    folder = TOY if folder is None else folder
    check(folder)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
