"""Models that are looked at: without dropout and the like, and afterwards they, and torch's random numbers, are as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..torch_state import fixed_torch_seed

__all__ = ["eval_mode", "leave_inference_mode"]


@torch.inference_mode(False)
def leave_inference_mode(model: nn.Module) -> None:
    """Put ordinary tensors in the place of those that were made in inference mode, which autograd and changes in place refuse;
    one that has several names stays one."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in places:
            for name, tensor in held.items():
                if tensor is not None and not is_lazy(tensor) and tensor.is_inference():
                    if id(tensor) not in made:
                        copy = tensor.detach().clone()
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                    held[name] = made[id(tensor)]


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` is in evaluation mode and draws the same random numbers each time; afterwards each module is in
    its own mode again."""
    modes = [(name, module.training) for name, module in model.named_modules()]
    model.eval()
    try:
        with fixed_torch_seed():
            yield
    finally:
        for name, training in modes:
            model.get_submodule(name).training = training
