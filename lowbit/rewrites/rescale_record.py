"""What a rewrite did to the input of a layer, for the kernel trace."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rescaled"]


@dataclass(frozen=True)
class Rescaled:
    """The input of a layer was divided channel by channel, and its weight multiplied.

    Attributes:
        rewrite: its name.
        into: the module whose parameters took the divisors; empty where a module in front of the layer does.
        choice: what was chosen, such as ``"alpha 0.55"``; empty where nothing was better than leaving all as it is.
        before, after: what the outputs of all layers that it concerns lose by rounding to nearest, squared and relative.
    """

    rewrite: str
    into: str
    choice: str
    before: float
    after: float

    def __str__(self) -> str:
        if not self.choice:
            return f"{self.rewrite} leaves it"
        where = f"folded into {self.into}" if self.into else "by a module in front of it"
        return f"{self.rewrite} {self.choice} {where}, {self.before:.2e} -> {self.after:.2e}"
