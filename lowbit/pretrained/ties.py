"""Weights that are one, as transformers is told of them: a tensor's name, and the name that it is stored under."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["keep_ties", "set_ties", "tie_outline"]


def tie_outline(model: Any) -> None:
    """Tie ``model`` while it is being built, when transformers' own ``tie_weights`` does nothing."""
    for name, stored in model.all_tied_weights_keys.items():
        path, leaf = name.rpartition(".")[::2]
        model.get_submodule(path)._parameters[leaf] = model.get_parameter(stored)


def set_ties(model: Any, ties: dict[str, str]) -> None:
    """Make ``ties`` those of ``model``, now and when ``tie_weights()`` asks the model's class again."""
    model.all_tied_weights_keys = dict(ties)
    model._tied_weights_keys = {f"{re.escape(name)}$": f"{re.escape(stored)}$" for name, stored in ties.items()}


def keep_ties(model: Any) -> None:
    """Make those ties of ``model`` its own that still hold: a layer of two may have been quantized by itself."""
    ties = getattr(model, "all_tied_weights_keys", None)
    if ties:
        set_ties(model, {name: stored for name, stored in ties.items() if _found(model, name) is _found(model, stored)})


def _found(model: Any, name: str) -> Any:
    path, leaf = name.rpartition(".")[::2]
    return getattr(model.get_submodule(path), leaf, None)
