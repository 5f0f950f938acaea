"""Modules that a rewrite puts into a model and that the model's own class knows nothing of: the header of a file lists each with
its settings, so that whoever loads it puts them back before the tensors come.

A linear layer keeps what is done to its input as its child ``transform``, whether it is float (:class:`TransformedLinear`) or
quantized, so that no layer's name changes.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TRANSFORMS", "Hadamard", "Transform", "ChannelScale", "TransformedLinear", "RMSNorm", "kronecker"]


class Transform(nn.Module, abc.ABC):
    """A module that :attr:`settings` describe, in plain data: ``type(module).outline(settings, old)`` makes one of the same
    shapes, in the place of ``old`` where something stood there."""

    kind: str

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a file's header says of the module."""

    @classmethod
    @abc.abstractmethod
    def outline(cls, settings: dict[str, Any], old: nn.Module | None) -> Transform:
        """A module of these settings, its numbers still to be filled in."""


class Hadamard(Transform):
    """``x`` [..., n] times an orthogonal matrix: the Kronecker product of small ones, over ``scale``.

    Each factor is one small product of everything, n (n_1 + n_2 + ...) multiplications a row in place of n^2: the fast
    Walsh-Hadamard transform where they are Sylvester's matrices, in steps that a processor likes. Computes in float32 at least.
    """

    kind = "hadamard"

    def __init__(self, factors: list[Tensor], scale: float) -> None:
        super().__init__()
        self.scale, self.orders = scale, [len(factor) for factor in factors]
        for i, factor in enumerate(factors):
            self.register_buffer(f"factor_{i}", factor)

    @property
    def factors(self) -> list[Tensor]:
        return [self.get_buffer(f"factor_{i}") for i in range(len(self.orders))]

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., n] to the same shape and dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return kronecker(x.to(wide), [factor.to(wide) for factor in self.factors], self.scale).to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves with the model and keeps its dtype: a rounded factor would turn vectors and stretch them."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]

    @property
    def settings(self) -> dict[str, Any]:
        return {"orders": self.orders, "scale": self.scale}

    @classmethod
    def outline(cls, settings: dict[str, Any], old: nn.Module | None) -> Hadamard:
        return cls([torch.empty(n, n) for n in settings["orders"]], float(settings["scale"]))

    def extra_repr(self) -> str:
        return " x ".join(map(str, self.orders))


class ChannelScale(Transform):
    """``x`` [..., n] times a number for each channel."""

    kind = "multiply"

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor.to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., n] to the same shape and dtype, rounded once."""
        return (x * self.get_buffer("factor")).to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves with the model and keeps its dtype: weights are rounded to what these very numbers leave to them."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]

    @property
    def settings(self) -> dict[str, Any]:
        return {"channels": self.get_buffer("factor").numel()}

    @classmethod
    def outline(cls, settings: dict[str, Any], old: nn.Module | None) -> ChannelScale:
        return cls(torch.empty(int(settings["channels"])))

    def extra_repr(self) -> str:
        return f"{self.get_buffer('factor').numel()} channels"


class RMSNorm(Transform):
    """``x`` [..., n] over the root of its mean square and ``eps``, without a weight of its own. Computes in float32 at least."""

    kind = "rms_norm"

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., n] to the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    @property
    def settings(self) -> dict[str, Any]:
        return {"eps": self.eps}

    @classmethod
    def outline(cls, settings: dict[str, Any], old: nn.Module | None) -> RMSNorm:
        return cls(float(settings["eps"]))

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class TransformedLinear(Transform, nn.Linear):
    """``transform(x) @ weight.T + bias``: a linear layer with a module in front, or with a bias that the one which stood in its
    place did not have. It reads the very parameters that it is given."""

    kind = "linear"
    transform: nn.Module | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transform: nn.Module | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.register_module("transform", transform)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in_features] to [..., out_features]."""
        return nn.functional.linear(x if self.transform is None else self.transform(x), self.weight, self.bias)

    @property
    def settings(self) -> dict[str, Any]:
        return {"shape": [self.out_features, self.in_features], "bias": self.bias is not None}

    @classmethod
    def outline(cls, settings: dict[str, Any], old: nn.Module | None) -> TransformedLinear:
        like: Any = None if old is None else old._parameters.get("weight")
        if like is None:
            raise ValueError("it stands in the place of another linear layer")
        n, k = settings["shape"]
        bias = nn.Parameter(torch.empty(n, dtype=like.dtype, device=like.device)) if settings["bias"] else None
        same = tuple(like.shape) == (n, k)
        return cls(like if same else nn.Parameter(torch.empty(n, k, dtype=like.dtype, device=like.device)), bias)


TRANSFORMS: dict[str, type[Transform]] = {found.kind: found for found in (Hadamard, ChannelScale, RMSNorm, TransformedLinear)}
"""Every such module by the name that files give it."""


def kronecker(x: Tensor, factors: list[Tensor], scale: float) -> Tensor:
    """``x`` [..., n] times the Kronecker product of ``factors`` [n_i, n_i], over ``scale``: one small product for each."""
    shape = x.shape
    rows, n = shape[:-1].numel(), shape[-1]
    x = x.reshape(rows, n)
    for factor in reversed(factors):
        order = len(factor)
        y = x.reshape(rows * (n // order), order) @ factor
        # The axis that is done goes to the front, so that the next one is the last; all done, they stand as they stood.
        x = y.reshape(rows, n // order, order).transpose(1, 2).reshape(rows, n)
    return x.reshape(shape) / scale
