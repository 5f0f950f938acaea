"""Whether a call changed what it was called with: then it hands more on than its output."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .byproducts import is_cache

__all__ = ["Witness"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, types.FunctionType, types.MethodType, type, nn.Module)
_DEPTH = 6  # of objects within objects


class Witness:
    """Remembers ``arguments`` as they are now. Caches of transformers do not count: a block has its own place in them."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._before = _Seen(arguments, {}, 0)

    def changed(self) -> str | None:
        """The kind of a thing in them that is not as it was; None where all is."""
        return self._before.changed(_Seen(self._arguments, {}, 0), set())


class _Seen:
    """A thing and its parts by name, all held, so that no other can take the identity of one that is gone."""

    def __init__(self, what: Any, known: dict[int, _Seen], depth: int) -> None:
        self._what, self._version = what, None
        self._parts: dict[Any, _Seen] = {}
        if isinstance(what, Tensor):
            self._version = None if what.is_inference() else what._version
        elif not isinstance(what, _PLAIN) and not is_cache(what) and depth < _DEPTH:
            known[id(what)] = self
            self._parts = {name: known.get(id(part)) or _Seen(part, known, depth + 1) for name, part in _parts(what).items()}

    def changed(self, now: _Seen, passed: set[int]) -> str | None:
        kind = type(now._what).__name__
        if self._version != now._version or self._parts.keys() != now._parts.keys():
            return kind
        if id(self) in passed:
            return None
        passed.add(id(self))
        for name, part in self._parts.items():
            other = now._parts[name]
            if part._what is not other._what and not (isinstance(part._what, _PLAIN) and part._what == other._what):
                return kind
            if (found := part.changed(other, passed)) is not None:
                return found
        return None


def _parts(what: Any) -> dict[Any, Any]:
    if isinstance(what, Mapping):
        return dict(what)
    if isinstance(what, (tuple, list)):
        return dict(enumerate(what))
    return dict(getattr(what, "__dict__", {}))
