"""What transformers' models make beside what they are asked for: caches of keys and values, and losses."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.hf_config import is_pretrained

__all__ = ["copied_if_cache", "is_cache", "without_cache_and_loss"]

_LOSSES = ("ForCausalLMLoss", "ForMaskedLMLoss")  # which take the memory of all logits, in float32


@contextlib.contextmanager
def without_cache_and_loss(model: nn.Module) -> Iterator[None]:
    """Within the block no model of transformers in ``model``, at whatever depth, begins a cache by itself or computes a loss over
    its vocabulary; afterwards all configurations are as they were, also where a model wrote to its own."""
    models: list[Any] = [module for module in model.modules() if is_pretrained(module)]
    configs: dict[int, Any] = {}
    for module in models:
        _gather(module.config, configs)
    before = [(config, dict(config.__dict__)) for config in configs.values()]
    losses = [(module, module.__dict__.get("_loss_function")) for module in models if _has_such_a_loss(module)]
    try:
        for config, settings in before:
            if settings.get("use_cache"):
                config.use_cache = False
        for module, _ in losses:
            module._loss_function = _no_loss
        yield
    finally:
        for config, settings in before:
            config.__dict__.clear()
            config.__dict__.update(settings)
        for module, loss in losses:
            if loss is None:
                del module._loss_function
            else:
                module._loss_function = loss


def _gather(config: Any, found: dict[int, Any]) -> None:
    """``config`` and the configurations in it, by identity."""
    if id(config) not in found:
        found[id(config)] = config
        for value in list(config.__dict__.values()):
            if hasattr(value, "to_diff_dict") and hasattr(value, "model_type"):
                _gather(value, found)


def _has_such_a_loss(module: Any) -> bool:
    home = sys.modules.get("transformers.loss.loss_utils")
    found = getattr(module, "loss_function", None)
    return found is not None and any(found is getattr(home, name, None) for name in _LOSSES)


def _no_loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=logits.device)


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of transformers, to which every block that is called with it adds."""
    home = sys.modules.get("transformers.cache_utils")
    return home is not None and isinstance(value, home.Cache)


def copied_if_cache(value: Any) -> Any:
    """``value`` for one call: a cache as a copy, so that the next call finds it as this one did; anything else as it is."""
    return copy.deepcopy(value) if is_cache(value) else value
