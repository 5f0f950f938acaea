"""Spare capacity behind the keys and values of a cache, into which a step writes instead of copying all that was kept before.

What a cache holds is a view of the buffer's first places. It may go on in place only while it holds the very tensors that the
buffer gave out last: a cache that was cropped, reordered, copied or written to otherwise holds others, and gets a buffer of its
own. So no tensor that anybody was given ever changes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["GrowableCache"]

_NAME = "_lowbit_growable_cache"
_MIN_GROWTH, _MAX_GROWTH = 16, 256  # places that are added at a time: a quarter of those that are there, within these


class GrowableCache:
    """Keys and values [B, H, P, D] with more places than are filled."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, tokens: int = 0) -> None:
        self.views: tuple[Tensor, Tensor] | None = None
        if keys is None or values is None:
            return
        filled = keys.shape[2]
        capacity = filled + tokens + min(max(filled // 4, _MIN_GROWTH), _MAX_GROWTH)
        self.keys, self.values = (_with_capacity(source, filled, capacity) for source in (keys, values))
        self.filled, self.capacity = filled, capacity
        self.views = keys, values

    @staticmethod
    def of(layer: Any, tokens: int) -> GrowableCache:
        """That of a dynamic layer of a cache, with as many free places as ``tokens``."""
        cache, current = layer.__dict__.get(_NAME), (layer.keys, layer.values)
        views = None if cache is None else cache.views
        if views is None or views[0] is not current[0] or views[1] is not current[1] or cache.filled + tokens > cache.capacity:
            return GrowableCache(*current, tokens)
        return cache

    def append(self, layer: Any, tokens: int) -> None:
        """``tokens`` more places are filled, and ``layer`` holds them."""
        self.filled += tokens
        keys, values = self.keys.narrow(2, 0, self.filled), self.values.narrow(2, 0, self.filled)
        layer.keys, layer.values = self.views = keys, values
        setattr(layer, _NAME, self)

    def __reduce__(self) -> Any:
        return GrowableCache, ()  # a copied cache makes its own


def _with_capacity(source: Tensor, filled: int, capacity: int) -> Tensor:
    batch, heads, _, size = source.shape
    cache = source.new_empty(batch, heads, capacity, size)
    cache[:, :, :filled] = source
    return cache
