"""Nested arguments (tuples, lists, dicts) seen as a row of leaves, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["leaves", "rebuilt"]


def leaves(what: Any) -> Iterator[Any]:
    """Everything in ``what`` that is no tuple, list or mapping, in order."""
    if isinstance(what, Mapping):
        for value in what.values():
            yield from leaves(value)
    elif isinstance(what, (tuple, list)):
        for value in what:
            yield from leaves(value)
    else:
        yield what


def rebuilt(what: Any, leaf: Callable[[Any], Any]) -> Any:
    """``what`` with each leaf replaced by ``leaf(it)``, called in the order of :func:`leaves`.

    Mappings keep their kind, which has to take its items as keyword arguments, as the outputs of transformers' models do.
    """
    if isinstance(what, Mapping):
        found = {key: rebuilt(value, leaf) for key, value in what.items()}
        return found if type(what) is dict else type(what)(**found)
    if isinstance(what, tuple) and hasattr(what, "_fields"):
        return type(what)(*(rebuilt(value, leaf) for value in what))
    if isinstance(what, (tuple, list)):
        return type(what)(rebuilt(value, leaf) for value in what)
    return leaf(what)
