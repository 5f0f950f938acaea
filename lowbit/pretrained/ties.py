"""Weights that are one, as transformers is told of them: a tensor's name, and the name that it is stored under."""

from __future__ import annotations

import re
from typing import Any

from ..weight import QuantizedModule

__all__ = ["quantized_ties", "set_ties", "tie_outline"]


def tie_outline(model: Any) -> None:
    """Tie ``model`` while it is being built, when transformers' own ``tie_weights`` does nothing."""
    for name, stored in model.all_tied_weights_keys.items():
        path, leaf = name.rpartition(".")[::2]
        model.get_submodule(path)._parameters[leaf] = model.get_parameter(stored)


def set_ties(model: Any, ties: dict[str, str]) -> None:
    """Make ``ties`` those of ``model``, now and when ``tie_weights()`` asks the model's class again."""
    model.all_tied_weights_keys = dict(ties)
    if any(isinstance(model.get_submodule(name.rpartition(".")[0]), QuantizedModule) for name in ties):
        # The class would name the float weights, which quantized modules do not have.
        model._tied_weights_keys = {f"{re.escape(name)}$": f"{re.escape(stored)}$" for name, stored in ties.items()}


def quantized_ties(model: Any) -> dict[str, str]:
    """The ties of ``model``, with the parts of each weight that was quantized since."""
    ties: dict[str, str] = {}
    for name, stored in model.all_tied_weights_keys.items():
        path, leaf = name.rpartition(".")[::2]
        module = model.get_submodule(path)
        if leaf == "weight" and isinstance(module, QuantizedModule):
            home = stored.rpartition(".")[0]
            ties.update({f"{path}.{part}": f"{home}.{part}" for part in module.weight._parts()})
        else:
            ties[name] = stored
    return ties
