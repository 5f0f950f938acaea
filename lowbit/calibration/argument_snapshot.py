"""Whether a call changed what it was called with: then it hands more on than its output."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .cache_and_loss import is_cache

__all__ = ["ArgumentSnapshot"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, types.FunctionType, types.MethodType, type, nn.Module)
_DEPTH = 6  # of objects within objects


class ArgumentSnapshot:
    """Remembers ``arguments`` as they are now. Caches of transformers do not count: a block has its own place in them."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._before = _Node(arguments, {}, 0)

    def mutated_type(self) -> str | None:
        """The kind of a thing in them that is not as it was; None where all is."""
        return self._before.mutated_type(_Node(self._arguments, {}, 0), set())


class _Node:
    """A thing and its parts by name, all held, so that no other can take the identity of one that is gone."""

    def __init__(self, value: Any, nodes: dict[int, _Node], depth: int) -> None:
        self._value, self._version = value, None
        self._parts: dict[Any, _Node] = {}
        if isinstance(value, Tensor):
            self._version = None if value.is_inference() else value._version
        elif not isinstance(value, _PLAIN) and not is_cache(value) and depth < _DEPTH:
            nodes[id(value)] = self
            self._parts = {name: nodes.get(id(part)) or _Node(part, nodes, depth + 1) for name, part in _parts(value).items()}

    def mutated_type(self, current: _Node, compared: set[int]) -> str | None:
        kind = type(current._value).__name__
        if self._version != current._version or self._parts.keys() != current._parts.keys():
            return kind
        if id(self) in compared:
            return None
        compared.add(id(self))
        for name, part in self._parts.items():
            other = current._parts[name]
            if part._value is not other._value and not (isinstance(part._value, _PLAIN) and part._value == other._value):
                return kind
            if (found := part.mutated_type(other, compared)) is not None:
                return found
        return None


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    return dict(getattr(value, "__dict__", {}))
