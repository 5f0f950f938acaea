"""Room behind the keys and values of a cache, in which a step writes instead of copying all that was kept before.

What a cache holds is a view of the room's first places. It may go on in place only while it holds the very tensors that the room
gave out last: a cache that was cropped, reordered, copied or written to otherwise holds others, and gets a room of its own. So no
tensor that anybody was given ever changes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["Room"]

_NAME = "_lowbit_room"
_LEAST, _MOST = 16, 256  # places that are added at a time: a quarter of those that are there, within these


class Room:
    """Keys and values [B, H, P, D] with more places than are filled."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, tokens: int = 0) -> None:
        self.given: tuple[Tensor, Tensor] | None = None
        if keys is None or values is None:
            return
        filled = keys.shape[2]
        places = filled + tokens + min(max(filled // 4, _LEAST), _MOST)
        self.keys, self.values = (_grown(kept, filled, places) for kept in (keys, values))
        self.filled, self.places = filled, places
        self.given = keys, values

    @staticmethod
    def of(layer: Any, tokens: int) -> Room:
        """That of a dynamic layer of a cache, with as many free places as ``tokens``."""
        room, held = layer.__dict__.get(_NAME), (layer.keys, layer.values)
        given = None if room is None else room.given
        if given is None or given[0] is not held[0] or given[1] is not held[1] or room.filled + tokens > room.places:
            return Room(*held, tokens)
        return room

    def take(self, layer: Any, tokens: int) -> None:
        """``tokens`` more places are filled, and ``layer`` holds them."""
        self.filled += tokens
        keys, values = self.keys.narrow(2, 0, self.filled), self.values.narrow(2, 0, self.filled)
        layer.keys, layer.values = self.given = keys, values
        setattr(layer, _NAME, self)

    def __reduce__(self) -> Any:
        return Room, ()  # a copied cache makes its own


def _grown(kept: Tensor, filled: int, places: int) -> Tensor:
    batch, heads, _, size = kept.shape
    room = kept.new_empty(batch, heads, places, size)
    room[:, :, :filled] = kept
    return room
