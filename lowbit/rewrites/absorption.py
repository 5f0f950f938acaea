"""How a module takes a factor on each channel of its output into its parameters, and a linear layer one on each of its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..layers import layer_kind
from ..weight import QuantizedModule

__all__ = ["absorb", "channels", "scale_columns", "way_of"]

Parameters = dict[str, Tensor]
Way = Callable[[nn.Module, Parameters, Tensor], Parameters]


def _rows(module: nn.Module, held: Parameters, factor: Tensor) -> Parameters:
    """Of a linear layer: the rows of its weight."""
    weight = held["weight"] * (factor if layer_kind(module) == "conv1d" else factor[:, None])
    return {**held, "weight": weight, **({"bias": held["bias"] * factor} if "bias" in held else {})}


def _gain(module: nn.Module, held: Parameters, factor: Tensor) -> Parameters:
    """Of a norm that multiplies by its weight."""
    return {name: tensor * factor for name, tensor in held.items()}


def _gain_from_one(module: nn.Module, held: Parameters, factor: Tensor) -> Parameters:
    """Of a norm that multiplies by 1 + its weight."""
    return {**_gain(module, held, factor), "weight": (1 + held["weight"]) * factor - 1}


WAYS: dict[str, Way] = {"rows": _rows, "gain": _gain, "gain from one": _gain_from_one}


def _held(module: nn.Module) -> Parameters:
    """``weight`` and ``bias`` in float64, where ``module`` has no other tensors and these are plain."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if isinstance(module, QuantizedModule) or own.keys() - {"weight", "bias"} or "weight" not in own:
        return {}
    if any(type(parameter) is not nn.Parameter or not parameter.is_floating_point() for parameter in own.values()):
        return {}
    return {name: parameter.detach().double() for name, parameter in own.items()}


def channels(module: nn.Module) -> int:
    """Of its output, if ``module`` may be one that takes factors; else 0."""
    held = _held(module)
    if not held:
        return 0
    kind, weight = layer_kind(module), held["weight"]
    if kind == "embedding" or (kind is None and weight.dim() != 1):
        return 0
    n = weight.shape[1] if kind == "conv1d" else weight.shape[0]
    return n if "bias" not in held or held["bias"].shape == (n,) else 0


def way_of(module: nn.Module, call: Callable[[], Tensor], output: Tensor) -> str | None:
    """The way in which the parameters of ``module`` take factors of its ``output``, found by trying: ``call`` runs it again on
    the same input. None where there is none."""
    held = _held(module)
    exponent = torch.arange(channels(module), device=output.device) % 4
    factor = torch.exp2(exponent.double())
    wanted = output.double() * factor
    dtype: torch.dtype = module.weight.dtype  # type: ignore[assignment]
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # a norm computes in float32, whatever its weight is
    room = 4 * eps * wanted.abs()
    for name, way in WAYS.items():
        if (name == "rows") != (layer_kind(module) is not None):
            continue
        try:
            _put(module, way(module, held, factor))
            found = call().double()
        finally:
            _put(module, held)
        # Sums of terms that cancel keep the rounding of their largest.
        if bool(((found - wanted).abs() <= torch.maximum(room, room.amax(-1, keepdim=True))).all()):
            return name
    return None


def absorb(module: nn.Module, way: str, divisor: Tensor, wide: bool = False) -> Tensor:
    """Divide the output of ``module`` by ``divisor`` [C] float64, positive; returns what it is divided by now that its
    parameters are rounded to their dtype. ``wide``: they may become float32, since they are rounded to a grid next."""
    before = _held(module)
    _put(module, WAYS[way](module, before, 1 / divisor.to(before["weight"].device)), wide)
    after = _held(module)
    if way == "rows":
        return divisor
    one = 1.0 if way == "gain from one" else 0.0
    pairs = [(before["weight"] + one, after["weight"] + one)]
    pairs += [(before["bias"], after["bias"])] if "bias" in before else []
    exact = divisor.to(before["weight"].device)
    for old, new in reversed(pairs):  # the weight's counts where there is one
        exact = torch.where((old != 0) & (new != 0), old / torch.where(new == 0, 1.0, new), exact)
    if "bias" in before:  # its rounding is its own
        _put(module, {**after, "bias": before["bias"] / exact}, wide)
    return exact.to(divisor.device)


def scale_columns(module: nn.Module, factor: Tensor, wide: bool = False) -> None:
    """Multiply what a linear layer does to each channel of its input by ``factor`` [K]; ``wide`` as for :func:`absorb`."""
    held = _held(module)
    factor = factor.to(held["weight"].device, torch.float64)
    _put(module, {"weight": held["weight"] * (factor[:, None] if layer_kind(module) == "conv1d" else factor)}, wide)


def _put(module: nn.Module, tensors: Parameters, wide: bool = False) -> None:
    for name, tensor in tensors.items():
        parameter = module._parameters[name]
        assert parameter is not None
        if wide and name == "weight":
            kept = torch.promote_types(parameter.dtype, torch.float32)
            module._parameters[name] = nn.Parameter(tensor.to(kept), parameter.requires_grad)
        else:
            parameter.data = tensor.to(parameter.dtype)
