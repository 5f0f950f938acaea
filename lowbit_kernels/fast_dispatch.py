"""Fast path of eager products: a call that was checked and selected before runs its kernel at once.

An operator implemented in Python costs more host time than a small layer takes on a GPU: the dispatcher enters Python for
autograd and again for the implementation, which checks and selects. Where nothing but the kernel has to see a call, its holder (a
module, a tensor) caches the kernel by the signature of x and calls it. Everything that observes operators (torch.compile, modes,
transforms, autocast, gradients, ``strict`` and ``trace``) gets the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from weakref import ref

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as _autocast
from torch._C import _is_tracing as _jit_trace
from torch._C import _len_torch_dispatch_stack as _dispatch_modes
from torch._C import _len_torch_function_stack as _function_modes
from torch._C._functorch import peek_interpreter_stack as _transform
from torch.autograd import forward_ad

from lowbit.catalog import generation, on_change
from lowbit.scheme import Scheme

from . import registry
from .ops import product_call
from .prepared_call import bind

__all__ = ["FastDispatch", "is_plain", "signature", "observed"]

_MOST = 64  # signatures cached by a holder: batch sizes vary, and the cache must not grow without end
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_grad = torch.is_grad_enabled
observed = registry.observed.get  # whether strict or trace is open; those see calls of the dispatcher alone


def is_plain(x: Tensor, trains: bool, bias: Tensor | None) -> bool:
    """Whether no mode, transform, autocast or gradient has to see a product of ``x``. ``trains``: the weight asks for a
    gradient.
    """
    return signature(x, trains, bias) is not None


def signature(x: Tensor, trains: bool, bias: Tensor | None) -> Hashable | None:
    """What the kernel of an eager product depends on beside the weight; None where the dispatcher has to see the call."""
    if (
        type(x) is not Tensor
        or _dispatch_modes()
        or _function_modes()
        or _autocast()
        or _transform() is not None
        or _jit_trace()
        or forward_ad._current_level >= 0
        or (_grad() and (trains or x.requires_grad or (bias is not None and bias.requires_grad)))
    ):
        return None
    if bias is None:
        return x.shape, x.dtype, x.device
    return (x.shape, x.dtype, x.device, bias.shape, bias.dtype, bias.device) if type(bias) in _PLAIN else None


class FastDispatch(dict[Hashable, Callable[..., Tensor]]):
    """The kernels of one weight's products, by signature. A weight that is exchanged gets a new one."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # for weak references to it

    def __deepcopy__(self, memo: dict[int, object]) -> FastDispatch:
        return FastDispatch()

    def find(
        self,
        signature: Hashable,
        op: str,
        layout: str,
        k: int,
        scheme: Scheme,
        activation: Scheme | None,
        x: Tensor,
        weight: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        bias: Tensor | None,
    ) -> Callable[..., Tensor] | None:
        """Checks and selects as the operator ``op`` does, raising what it raises, and caches the kernel.

        None where the operator has to be called: for parts that are more than plain tensors, and for an x of another ``k``, which
        only the caller can refuse, since the operator takes K from x.
        """
        if x.shape[-1:] != (k,) or any(type(part) not in _PLAIN for part in weight if part is not None):
            return None
        before = generation()
        call = product_call(op, str(scheme), layout, x, *weight, bias, None if activation is None else str(activation))
        kernel = registry.select(call)
        registry.warn_of_reference(kernel, call)
        # bytes of another layout are converted for each call, as the registry does
        reads = kernel.layout is not None or layout == "canonical"
        run = bind(kernel.run, scheme) if reads else partial(registry.run, call)
        if len(self) >= _MOST:
            self.clear()
        if not self:
            _filled.add(ref(self, _filled.discard))
        self[signature] = run
        if before != generation():  # something was registered meanwhile
            self.clear()
        return run


_filled: set[ref[FastDispatch]] = set()


@on_change
def _forget() -> None:
    """Forgets all kernels: once something is registered another kernel may run, or a name may mean other values."""
    for dispatch in [found for reference in list(_filled) if (found := reference()) is not None]:
        dispatch.clear()
