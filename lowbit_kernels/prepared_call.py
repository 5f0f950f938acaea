"""Rows bound to a scheme: what follows from the scheme alone is computed once, not in every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from lowbit.scheme import Scheme

__all__ = ["SchemeBound", "Product", "bind", "direct", "prepared"]

Product = Callable[..., Tensor]


class SchemeBound:
    """The ``run`` of a row, as a decorator of ``make``: ``make(scheme)`` is its product for one scheme, same arguments."""

    def __init__(self, make: Callable[[Scheme], Product]) -> None:
        self.make = make
        update_wrapper(self, make)

    def __call__(
        self,
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        outer: Tensor | None,
        bias: Tensor | None,
        scheme: Scheme,
        *activation: Any,
    ) -> Tensor:
        """``activation``: further arguments of the product behind the scheme."""
        return self.make(scheme)(x, packed, scale, zero_point, outer, bias, scheme, *activation)


def bind(run: Product, scheme: Scheme) -> Product:
    """``run`` for calls with this scheme alone."""
    return run.make(scheme) if isinstance(run, SchemeBound) else run


def direct(operator: OpOverload) -> Product:
    """The dispatcher's entry of ``operator``, without its Python wrapper."""
    return operator._op


def prepared(operator: OpOverload, check: OpOverload, launch: OpOverload, *args: Any, **named: Any) -> Product:
    """``operator`` bound to ``args`` and ``named``, with the weight checked only once while it stays where it is in memory.

    ``check`` takes the arguments of ``operator`` and returns bytes that ``launch`` multiplies with; none where the weight would
    have to be copied. Checking all arguments costs a layer of one row more host time than its kernel. The first call is not
    prepared: it may be the only one. ``given``: a static scale of ``x``, the last argument.
    """
    multiply, look, launch_prepared = direct(operator), direct(check), direct(launch)
    kept: tuple[tuple[Any, ...], Tensor | None] = ((), None)  # replaced as a whole, since threads may share a layer

    def product(
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        outer: Tensor | None,
        bias: Tensor | None,
        scheme: Scheme,
        given: Tensor | None = None,
    ) -> Tensor:
        nonlocal kept
        addresses = (
            packed.data_ptr(),
            packed.numel(),
            packed.stride(),
            scale.data_ptr(),
            scale.numel(),
            scale.stride(),
            None if zero is None else (zero.data_ptr(), zero.stride()),
            0 if outer is None else outer.data_ptr(),
            None if bias is None else (bias.data_ptr(), bias.stride()),
            0 if given is None else given.data_ptr(),
        )
        known, ready = kept
        if addresses == known:
            if ready is None:
                ready = look(x, packed, scale, zero, outer, bias, *args, *(() if given is None else (given,)), **named)
                kept = addresses, ready
            if ready.numel():
                return launch_prepared(x, ready)
        else:
            kept = addresses, None
        return multiply(x, packed, scale, zero, outer, bias, *args, *(() if given is None else (given,)), **named)

    return product
