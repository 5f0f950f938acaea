"""Shortcuts: eager products that were checked and selected before run their kernel at once.

An operator that Python implements costs more host time than a small layer takes on a GPU: the dispatcher goes through
Python for autograd and again for the implementation, which checks and selects. Where nothing but the kernel has to see a
call, its holder (a module, a tensor) keeps the kernel by the signature of x and calls it. Whatever else looks at operators
(torch.compile, modes, transforms, autocast, gradients, ``strict`` and ``trace``) gets the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state as _jit_trace
from torch._C import _is_any_autocast_enabled as _autocast
from torch._C import _len_torch_dispatch_stack as _dispatch_modes
from torch._C import _len_torch_function_stack as _function_modes
from torch._C._functorch import peek_interpreter_stack as _transform
from torch.autograd import forward_ad

from lowbit.scheme import Scheme

from . import registry
from .ops import own, product_call

__all__ = ["Shortcuts"]

_MOST = 64  # signatures a holder keeps: batches vary, and a walk through all of them should not grow without end
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def _signature(x: Tensor, bias: Tensor | None, scale: Tensor) -> Hashable | None:
    """What the kernel of an eager product depends on beside the weight; None where the dispatcher has to see the call."""
    if (
        type(x) is not Tensor
        or _dispatch_modes()
        or _function_modes()
        or _autocast()
        or _transform() is not None
        or _jit_trace() is not None
        or forward_ad._current_level >= 0
        or registry.watched()
    ):
        return None
    if bias is None:
        if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad):
            return None
        return x.shape, x.dtype, x.device
    if type(bias) not in _PLAIN or (torch.is_grad_enabled() and (x.requires_grad or bias.requires_grad or scale.requires_grad)):
        return None
    return x.shape, x.dtype, x.device, bias.shape, bias.dtype, bias.device


class Shortcuts(dict[Hashable, Callable[..., Tensor]]):
    """The kernels of one weight's products, by signature. Its holder clears it whenever the weight changes what it is."""

    def product(
        self,
        op: str,
        layout: str,
        k: int,
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        outer: Tensor | None,
        bias: Tensor | None,
        scheme: Scheme,
        *how: Any,
    ) -> Tensor | None:
        """The product that ``op`` means; None where the operator itself has to be called. ``how``: what kernels take then.

        Tensors that do not fit raise what they raise there; the operator knows ``k`` from x alone, so another k is its
        caller's to refuse.
        """
        signature = _signature(x, bias, scale)
        if signature is None:
            return None
        run = self.get(signature)
        if run is None:
            weight = (packed, scale, zero_point, outer)
            if x.shape[-1:] != (k,) or any(type(part) not in _PLAIN for part in weight if part is not None):
                return None
            run = _selected(op, str(scheme), layout, x, *weight, bias)
            if len(self) >= _MOST:
                self.clear()
            self[signature] = run
        return own(run(x, packed, scale, zero_point, outer, bias, scheme, *how))


def _selected(op: str, scheme: str, layout: str, *args: Any) -> Callable[..., Tensor]:
    call = product_call(op, scheme, layout, *args)
    kernel = registry.select(call)
    # Bytes of another layout are restored for each call, as the registry does.
    return kernel.run if kernel.layout is not None or layout == "canonical" else partial(registry.run, call)
