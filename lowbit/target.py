"""A target: what becomes of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from .algorithms import ROUNDERS
from .scales import METHODS
from .scheme import SCHEMES, Scheme

__all__ = ["Target", "activation_scheme"]


@dataclass(frozen=True)
class Target:
    """What becomes of a layer.

    Attributes:
        weight: the scheme of its weight.
        activation: the scheme that its input is rounded to, or None to leave it as it is.
        rounder: how codes are chosen; a key of ``lowbit.algorithms.ROUNDERS``.
        scales: how scales are chosen, ``"range"`` or ``"mse"``.
    """

    weight: Scheme
    activation: Scheme | None = None
    rounder: str = "rtn"
    scales: str = "range"

    def __post_init__(self) -> None:
        if self.rounder not in ROUNDERS:
            raise ValueError(f"no rounder named {self.rounder!r}; there are {', '.join(ROUNDERS)}")
        if self.scales not in METHODS:
            raise ValueError(f"scales must be one of {', '.join(METHODS)}, got {self.scales!r}")
        if self.activation is not None and self.activation.zero_point != "none":
            raise ValueError(f"an activation scheme has no zero point, got {self.activation}")

    @staticmethod
    def of(what: Target | Scheme | str | Mapping[str, Any]) -> Target:
        """A target from a scheme, the name of one, or a mapping of its fields."""
        if isinstance(what, Target):
            return what
        if isinstance(what, Scheme):
            return Target(what)
        if isinstance(what, str):
            return Target(Scheme.parse(what))
        if isinstance(what, Mapping):
            known = {"weight", "activation", "rounder", "scales"}
            if unknown := sorted(set(what) - known):
                raise ValueError(f"unknown field {', '.join(unknown)} of a target; there are {', '.join(sorted(known))}")
            if "weight" not in what:
                raise ValueError("a target needs a field 'weight': the name of a scheme")
            fields = dict(what, weight=_scheme(what["weight"]))
            if fields.get("activation") is not None:
                fields["activation"] = activation_scheme(fields["activation"])
            return Target(**fields)
        got = f"the function {what.__name__}: call it" if isinstance(what, FunctionType) else f"{what!r:.80}"
        raise TypeError(f"a target is a scheme, a name or what int4_weight_only() returns, got {got}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`of` takes; fields at their defaults are left out."""
        out: dict[str, Any] = {"weight": str(self.weight)}
        if self.activation is not None:
            out["activation"] = str(self.activation)
        if self.rounder != "rtn":
            out["rounder"] = self.rounder
        if self.scales != "range":
            out["scales"] = self.scales
        return out

    def __str__(self) -> str:
        activation = "" if self.activation is None else f", x {self.activation}"
        how = "" if (self.rounder, self.scales) == ("rtn", "range") else f", {self.rounder}/{self.scales}"
        return f"{self.weight}{activation}{how}"


def _scheme(what: Any) -> Scheme:
    return what if isinstance(what, Scheme) else Scheme.parse(str(what))


def activation_scheme(what: Any) -> Scheme:
    """A scheme for activations; scales of a named one are float32, since nobody stores them."""
    scheme = _scheme(what)
    return scheme.replace(scale="fp32") if what in SCHEMES and scheme.scale == "bf16" else scheme
