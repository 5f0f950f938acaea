"""Rows bound to a scheme: what a product takes from the scheme alone is worked out once, and not in every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from lowbit.scheme import Scheme

__all__ = ["Bound", "Product", "bind", "direct"]

Product = Callable[..., Tensor]


class Bound:
    """The ``run`` of a row, decorating ``make``: ``make(scheme)`` is its product for one scheme, with the same arguments."""

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
        """``activation``: what a product takes behind the scheme that rounds ``x`` too."""
        return self.make(scheme)(x, packed, scale, zero_point, outer, bias, scheme, *activation)


def bind(run: Product, scheme: Scheme) -> Product:
    """``run`` for calls with this scheme alone."""
    return run.make(scheme) if isinstance(run, Bound) else run


def direct(operator: OpOverload) -> Product:
    """The dispatcher's entry of ``operator``, which its Python object only passes arguments on to."""
    return operator._op
