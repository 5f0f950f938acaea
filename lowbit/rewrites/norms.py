"""Norms, known by what they compute: a module divides each row by its root mean square, with the mean taken away before or not,
and then multiplies by a gain and adds a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..transforms import RMSNorm

__all__ = ["Norm", "measure_norm"]

_CLOSE = 1e-4  # of numbers about 1 that were computed in float32, by modules some of which round to it inside


@dataclass(frozen=True, eq=False)
class Norm:
    """What a norm computes: n(x) gain + bias, with n(x) = c / sqrt(mean(c^2) + eps).

    Attributes:
        module: the module itself.
        centres: whether c is x minus its mean (a LayerNorm), or x itself.
        gain, bias: float64 [d]. The gain is ``offset`` plus the module's parameter ``weight`` where it has one.
        weight, shift: the names of its parameters that multiply and add, if it has them.
        eps: of a norm that centres, which an :class:`~lowbit.transforms.RMSNorm` takes over.
    """

    module: nn.Module
    centres: bool
    gain: Tensor
    bias: Tensor
    offset: float
    weight: str | None
    shift: str | None
    eps: float

    @property
    def is_plain(self) -> bool:
        """Whether it neither multiplies nor adds."""
        return bool((self.gain == 1).all()) and not bool(self.bias.any())

    def plain(self, x: Tensor) -> Tensor:
        """n(x) for ``x`` [..., d] whose mean is taken away already where this centres."""
        if self.centres:
            return RMSNorm(self.eps)(x)
        return _called(self.module, x, self._unit())

    def strip(self) -> None:
        """Make the module, one that does not centre, compute n(x)."""
        with torch.no_grad():
            for name, value in self._unit().items():
                self.module.get_parameter(name).copy_(value)

    def _unit(self) -> dict[str, Tensor]:
        values = {self.weight: 1 - self.offset, self.shift: 0.0}
        return {name: torch.full_like(self.module.get_parameter(name), v) for name, v in values.items() if name is not None}


def measure_norm(module: nn.Module, size: int) -> Norm | None:
    """What ``module`` computes on rows of ``size`` numbers, if it is a norm of them; None for anything else.

    It is called on random rows with its parameters set to 0 and to 1; hooks on it run.
    """
    parameters = dict(module.named_parameters())
    if size < 2 or len(parameters) > 2 or any(tuple(parameter.shape) != (size,) for parameter in parameters.values()):
        return None
    like = next(iter(parameters.values()), torch.empty(0))
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(4, size, generator=draw, dtype=torch.float64) + 0.5).to(like.dtype)
    base = _rows(module, x, dict.fromkeys(parameters, 0.0))
    if base is None:
        return None
    ones = {name: _rows(module, x, {**dict.fromkeys(parameters, 0.0), name: 1.0}) for name in parameters}
    shift = next((name for name, y in ones.items() if y is not None and _close(y, base + 1)), None)
    weight = next((name for name in parameters if name != shift), None)

    def unit(x: Tensor) -> Tensor:
        """n(x), as the difference that the weight makes."""
        base = _rows(module, x, dict.fromkeys(parameters, 0.0))
        full = base if weight is None else _rows(module, x, {**dict.fromkeys(parameters, 0.0), weight: 1.0})
        assert base is not None
        assert full is not None
        return base if weight is None else full - base

    n = unit(x)
    offset = float((base * n).sum() / n.square().sum().clamp(min=1e-30))
    offset = float(round(offset)) if abs(offset - round(offset)) < _CLOSE else offset
    if len(parameters) - (shift is not None) > 1 or not _close(base, offset * n) or not _close(unit(1000 * x), n, 100):
        return None  # what a norm gives does not grow with x
    centred = x - x.mean(-1, keepdim=True)
    centres = not _along(n, x.double())
    eps = next((float(e) for e in (getattr(module, name, None) for name in ("eps", "variance_epsilon")) if e is not None), 0.0)
    if centres and not (
        _along(n, centred.double())
        and all(_close(unit(part), RMSNorm(eps)(part).double(), 10) for part in (centred, 1e-3 * centred))  # the smaller sees eps
    ):
        return None
    gain = torch.full((size,), offset, dtype=torch.float64)
    gain = gain if weight is None else gain + parameters[weight].detach().cpu().double()
    bias = torch.zeros(size, dtype=torch.float64) if shift is None else parameters[shift].detach().cpu().double()
    return Norm(module, centres, gain, bias, offset, weight, shift, eps)


def _rows(module: nn.Module, x: Tensor, values: dict[str, float]) -> Tensor | None:
    """What ``module`` gives for ``x`` where each of its parameters is one number all over; None where it takes no such rows."""
    try:
        numbers = {name: torch.full_like(module.get_parameter(name), value) for name, value in values.items()}
        there = next((number.device for number in numbers.values()), x.device)
        found = _called(module, x.to(there), numbers)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # it wants something else
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape or not found.is_floating_point():
        return None
    return found.detach().cpu().double()


def _called(module: nn.Module, x: Tensor, parameters: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return functional_call(module, parameters, (x,))


def _close(y: Tensor, x: Tensor, times: float = 1) -> bool:
    return bool(((y - x).abs() < times * _CLOSE).all())


def _along(y: Tensor, x: Tensor) -> bool:
    """Whether each row of ``y`` is a multiple of that of ``x``, and not of 0."""
    factor = (y * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    return bool((factor > _CLOSE).all()) and bool(((y - factor * x).abs() < _CLOSE).all())
