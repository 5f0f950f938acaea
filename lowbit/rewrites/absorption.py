"""How a module takes a factor on each channel of its output into its parameters, and a linear layer one on each of its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..layers import layer_kind
from ..quantized_module import QuantizedModule

__all__ = ["absorb", "channels", "scale_columns", "absorb_rule_of"]

Parameters = dict[str, Tensor]
AbsorbRule = Callable[[Parameters, Tensor], Parameters]

_ROWS = 256  # of a weight that are float64 at a time


def _gain(parameters: Parameters, factor: Tensor) -> Parameters:
    """Of a norm that multiplies by its weight."""
    return {name: tensor * factor for name, tensor in parameters.items()}


def _gain_from_one(parameters: Parameters, factor: Tensor) -> Parameters:
    """Of a norm that multiplies by 1 + its weight."""
    return {**_gain(parameters, factor), "weight": (1 + parameters["weight"]) * factor - 1}


ROWS = "rows"  # of a linear layer's weight
ABSORB_RULES: dict[str, AbsorbRule] = {"gain": _gain, "gain from one": _gain_from_one}


def _plain(module: nn.Module) -> dict[str, nn.Parameter]:
    """``weight`` and ``bias``, where ``module`` has no other parameters and these are plain; else nothing."""
    plain = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if isinstance(module, QuantizedModule) or plain.keys() - {"weight", "bias"} or "weight" not in plain:
        return {}
    if any(type(parameter) is not nn.Parameter or not parameter.is_floating_point() for parameter in plain.values()):
        return {}
    return plain


def _norm_parameters(module: nn.Module) -> Parameters:
    """Those of a norm, in float64."""
    return {name: parameter.detach().double() for name, parameter in _plain(module).items()}


def channels(module: nn.Module) -> int:
    """Of its output, if ``module`` may be one that takes factors; else 0."""
    plain = _plain(module)
    if not plain:
        return 0
    kind, weight = layer_kind(module), plain["weight"]
    if kind == "embedding" or (kind is None and weight.dim() != 1):
        return 0
    n = weight.shape[1] if kind == "conv1d" else weight.shape[0]
    return n if "bias" not in plain or plain["bias"].shape == (n,) else 0


def absorb_rule_of(module: nn.Module, call: Callable[[], Tensor], output: Tensor) -> str | None:
    """The way in which the parameters of ``module`` take factors of its ``output``, found by trying: ``call`` runs it again on
    the same input. None where there is none."""
    plain = _plain(module)
    exponent = torch.arange(channels(module), device=output.device) % 4
    factor = torch.exp2(exponent.double())
    wanted = output.double() * factor
    dtype: torch.dtype = module.weight.dtype  # type: ignore[assignment]
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # a norm computes in float32, whatever its weight is
    room = 4 * eps * wanted.abs()
    before = {name: parameter.detach().clone() for name, parameter in plain.items()}
    for name in (ROWS,) if layer_kind(module) is not None else ABSORB_RULES:
        try:
            _absorb_output(module, name, factor)
            found = call().double()
        finally:
            for leaf, parameter in plain.items():
                parameter.data = before[leaf]
        # Sums of terms that cancel keep the rounding of their largest.
        if bool(((found - wanted).abs() <= torch.maximum(room, room.amax(-1, keepdim=True))).all()):
            return name
    return None


def absorb(module: nn.Module, rule: str, divisor: Tensor, keep_float32: bool = False) -> Tensor:
    """Divide the output of ``module`` by ``divisor`` [C] float64, positive; returns what it is divided by now that its
    parameters are rounded to their dtype. ``keep_float32``: they may become float32, since they are rounded to a grid next."""
    before = {} if rule == ROWS else _norm_parameters(module)
    _absorb_output(module, rule, 1 / divisor.to(_plain(module)["weight"].device), keep_float32)
    if rule == ROWS:
        return divisor
    after = _norm_parameters(module)
    one = 1.0 if rule == "gain from one" else 0.0
    pairs = [(before["weight"] + one, after["weight"] + one)]
    pairs += [(before["bias"], after["bias"])] if "bias" in before else []
    exact = divisor.to(before["weight"].device)
    for old, new in reversed(pairs):  # the weight's counts where there is one
        exact = torch.where((old != 0) & (new != 0), old / torch.where(new == 0, 1.0, new), exact)
    if "bias" in before:  # its rounding is its own
        _put(module, {"bias": before["bias"] / exact})
    return exact.to(divisor.device)


def scale_columns(module: nn.Module, factor: Tensor, keep_float32: bool = False) -> None:
    """Multiply what a linear layer does to each channel of its input by ``factor`` [K]; ``keep_float32`` as for
    :func:`absorb`."""
    _scale(module, factor, 1, keep_float32)


def _absorb_output(module: nn.Module, rule: str, factor: Tensor, keep_float32: bool = False) -> None:
    """Multiply the output of ``module`` by ``factor`` [C] float64."""
    if rule != ROWS:
        _put(module, ABSORB_RULES[rule](_norm_parameters(module), factor))
        return
    _scale(module, factor, 0, keep_float32)
    if (bias := module._parameters.get("bias")) is not None:
        _put(module, {"bias": bias.detach().double() * factor})


def _scale(module: nn.Module, factor: Tensor, axis: int, keep_float32: bool) -> None:
    """Multiply a linear layer's weight by ``factor`` along ``axis`` of [N, K], in float64 and a slice of it at a time."""
    weight = module._parameters["weight"]
    assert weight is not None
    dtype = torch.promote_types(weight.dtype, torch.float32) if keep_float32 else weight.dtype
    out = torch.empty_like(weight, dtype=dtype, requires_grad=False)
    along = factor.to(weight.device, torch.float64).unsqueeze(1 - (axis if layer_kind(module) != "conv1d" else 1 - axis))
    for part, rows, by in zip(
        out.split(_ROWS), weight.detach().split(_ROWS), along.expand(weight.shape).split(_ROWS), strict=True
    ):
        part.copy_(rows.double().mul_(by))
    if keep_float32:
        module._parameters["weight"] = nn.Parameter(out, weight.requires_grad)
    else:
        weight.data = out


def _put(module: nn.Module, tensors: Parameters) -> None:
    for name, tensor in tensors.items():
        parameter = module._parameters[name]
        assert parameter is not None
        parameter.data = tensor.to(parameter.dtype)
