"""What torch's operators and functions mean on a QTensor: tables that the modules ``tensor_*`` fill, and that QTensor asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ATEN", "FUNCTIONS", "OTHERS", "implements"]

Handler = Callable[..., Any]
OTHERS = "others"
"""The row of :data:`ATEN` for every operator without one; it takes (operator, args, kwargs)."""

ATEN: dict[Any, Handler] = {}
"""Operators, below autograd."""

FUNCTIONS: dict[Any, Handler] = {}
"""Functions as a program calls them; a handler that gives ``NotImplemented`` leaves the call to torch."""


def implements(table: dict[Any, Handler], *keys: Any) -> Callable[[Handler], Handler]:
    """Enter the decorated function into ``table`` under each of ``keys``."""

    def add(handler: Handler) -> Handler:
        table.update(dict.fromkeys(keys, handler))
        return handler

    return add
