"""Nested arguments (tuples, lists, dicts) seen as a row of leaves, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["tree_leaves", "tree_map"]


def tree_leaves(tree: Any) -> Iterator[Any]:
    """Everything in ``tree`` that is no tuple, list or mapping, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from tree_leaves(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tree_leaves(value)
    else:
        yield tree


def tree_map(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """``tree`` with each leaf replaced by ``fn(it)``, called in the order of :func:`tree_leaves`.

    Mappings keep their kind, which has to take its items as keyword arguments, as the outputs of transformers' models do.
    """
    if isinstance(tree, Mapping):
        found = {key: tree_map(value, fn) for key, value in tree.items()}
        return found if type(tree) is dict else type(tree)(**found)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(value, fn) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(tree_map(value, fn) for value in tree)
    return fn(tree)
