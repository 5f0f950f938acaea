"""Layer configs: what becomes of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

from .algorithms import ROUNDERS
from .options import Options, normalized_options
from .scales import METHODS
from .scheme import PLAIN_SCALES, SCHEMES, Scheme

__all__ = ["ACTIVATION_SCALES", "FIELDS", "LayerConfig", "LayerConfigLike", "activation_scheme"]

ACTIVATION_SCALES = ("token", "static")
FIELDS = ("weight", "activation", "rounder", "scales", "options", "activation_scale")


@dataclass(frozen=True)
class LayerConfig:
    """What becomes of a layer.

    Attributes:
        weight: the scheme of its weight.
        activation: the scheme that its input is rounded to, or None to leave it as it is.
        rounder: how codes are chosen; a key of ``lowbit.algorithms.ROUNDERS``.
        scales: how scales are chosen by round-to-nearest, ``"range"`` or ``"mse"``; other rounders choose their own.
        options: of the rounder, by name: a mapping, which is kept as sorted pairs.
        activation_scale: ``"token"`` for a scale a token, found as it comes, or ``"static"`` for one of all inputs, found by
            calibration.
    """

    weight: Scheme
    activation: Scheme | None = None
    rounder: str = "rtn"
    scales: str = "range"
    options: Options = ()
    activation_scale: str = "token"

    def __post_init__(self) -> None:
        if not ROUNDERS.has(self.rounder):
            raise ValueError(f"no rounder named {self.rounder!r}; there are {', '.join(ROUNDERS)}")
        if self.scales not in METHODS:
            raise ValueError(f"scales must be one of {', '.join(METHODS)}, got {self.scales!r}")
        if self.rounder != "rtn" and self.scales != "range":
            raise ValueError(f"{self.rounder} chooses scales of its own: leave out scales: {self.scales}")
        rounder = ROUNDERS[self.rounder]
        known = {name: default for name, default in rounder.options.items() if name != "scales"}
        object.__setattr__(self, "options", normalized_options(self.rounder, self.options, known, rounder.check))
        if self.activation is not None and self.activation.zero_point != "none":
            raise ValueError(f"an activation scheme has no zero point, got {self.activation}")
        self._check_activation_scale()

    def _check_activation_scale(self) -> None:
        if self.activation_scale not in ACTIVATION_SCALES:
            raise ValueError(f"activation_scale must be {' or '.join(ACTIVATION_SCALES)}, got {self.activation_scale!r}")
        if self.activation_scale == "static" and (self.activation is None or self.activation.scale not in PLAIN_SCALES):
            raise ValueError(
                "a static activation_scale goes with an activation scheme whose scale is "
                f"{', '.join(PLAIN_SCALES)}, got {self.activation}"
            )

    @property
    def needs_data(self) -> str:
        """What of it cannot be found without calibration data; empty where nothing is."""
        if ROUNDERS[self.rounder].needs_statistics:
            return f"the rounder {self.rounder}"
        return "a static activation_scale" if self.activation_scale == "static" else ""

    @property
    def uses_data(self) -> bool:
        """Whether calibration data changes what it makes of a layer."""
        return ROUNDERS[self.rounder].uses_statistics or self.activation_scale == "static"

    @property
    def needs_drift(self) -> bool:
        """Whether its rounder looks at how far the layer's inputs are from those of the float model."""
        return ROUNDERS[self.rounder].needs_drift(**dict(self.options))

    def replace(self, **changes: Any) -> LayerConfig:
        """A layer config with some fields changed."""
        return dataclasses.replace(self, **changes)

    @staticmethod
    def of(value: LayerConfigLike) -> LayerConfig:
        """A layer config from a scheme, the name of one, or a mapping of its fields."""
        if isinstance(value, LayerConfig):
            return value
        if isinstance(value, Scheme):
            return LayerConfig(value)
        if isinstance(value, str):
            return LayerConfig(Scheme.parse(value))
        if isinstance(value, Mapping):
            if unknown := sorted(set(value) - set(FIELDS)):
                raise ValueError(f"unknown field {', '.join(unknown)} of a layer config; there are {', '.join(sorted(FIELDS))}")
            if "weight" not in value:
                raise ValueError("a layer config needs a field 'weight': the name of a scheme")
            fields = dict(value, weight=_scheme(value["weight"]))
            if fields.get("activation") is not None:
                fields["activation"] = activation_scheme(fields["activation"])
            if not isinstance(fields.get("options", {}), Mapping):
                raise ValueError(f"options must be names and values such as {{damping: 0.01}}, got {fields['options']!r:.80}")
            fields["options"] = tuple(fields.get("options", {}).items())
            return LayerConfig(**fields)
        got = f"the function {value.__name__}: call it" if isinstance(value, FunctionType) else f"{value!r:.80}"
        raise TypeError(f"a layer config is a scheme, a name or what int4_weight_only() returns, got {got}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`of` takes; fields at their defaults are left out."""
        out: dict[str, Any] = {"weight": str(self.weight)}
        if self.activation is not None:
            out["activation"] = str(self.activation)
        if self.rounder != "rtn":
            out["rounder"] = self.rounder
        if self.scales != "range":
            out["scales"] = self.scales
        if self.options:
            out["options"] = dict(self.options)
        if self.activation_scale != "token":
            out["activation_scale"] = self.activation_scale
        return out

    def __str__(self) -> str:
        static = " static" if self.activation_scale == "static" else ""
        activation = "" if self.activation is None else f", x {self.activation}{static}"
        parts = [] if self.rounder == "rtn" else [self.rounder]
        parts += [] if self.scales == "range" else [f"scales={self.scales}"]
        parts += [f"{name}={value}" for name, value in self.options]
        return f"{self.weight}{activation}{', ' if parts else ''}{' '.join(parts)}"


LayerConfigLike: TypeAlias = LayerConfig | Scheme | str | Mapping[str, Any]
"""What :meth:`LayerConfig.of` takes."""


def _scheme(value: Any) -> Scheme:
    return value if isinstance(value, Scheme) else Scheme.parse(str(value))


def activation_scheme(value: Any) -> Scheme:
    """A scheme for activations; scales of a named one are float32, since nobody stores them."""
    scheme = _scheme(value)
    return scheme.replace(scale="fp32") if value in SCHEMES and scheme.scale == "bf16" else scheme
