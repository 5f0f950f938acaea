"""What quantization did to the weights: bytes by kind, signal over noise of each layer, histograms before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import QLinear, QTensor

__all__ = ["float_weights", "histogram", "layer_figures", "size_of"]

_BINS = 80
_DRAWN = 3  # layers with a histogram
_SCALES = ("scale", "zero_point", "outer", "input_scale")


def size_of(model: nn.Module) -> dict[str, int]:
    """Bytes of the parameters of ``model`` by kind: packed ``codes``, ``scales`` (with zero points), and what is ``float``."""
    sizes = {"codes": 0, "scales": 0, "float": 0}
    quantized = {id(part) for part in _packed(model)}
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        kind = "codes" if id(parameter) in quantized else "scales" if last in _SCALES else "float"
        sizes[kind] += parameter.numel() * parameter.element_size()
    return sizes


def _packed(model: nn.Module) -> list[Any]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith(".packed") or name == "packed"]


def float_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a float model by the names of their layers, as they are before :func:`lowbit.quantize_`."""
    modules = model.named_modules()
    return {name: module.weight.detach() for name, module in modules if isinstance(getattr(module, "weight", None), Tensor)}


def layer_figures(model: nn.Module, before: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of each quantized layer its scheme, stored bits a weight and signal over noise in dB against ``before``; and
    :func:`histogram` of a few layers from the first to the last."""
    quantized = [(name, module) for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), QTensor)]
    layers, drawn = [], {round(i * (len(quantized) - 1) / max(_DRAWN - 1, 1)) for i in range(_DRAWN)}
    histograms = []
    for i, (name, module) in enumerate(quantized):
        weight, was = module.weight, _as_stored(before.get(name), module)
        error = None if was is None else weight.error(was).sqnr_db
        layers.append(
            {
                "name": name,
                "scheme": str(weight.scheme),
                "bits_per_weight": weight.bits_per_weight,
                "sqnr_db": error if error is not None and math.isfinite(error) else None,
            }
        )
        if i in drawn and was is not None:
            histograms.append({"name": name, **histogram(was, weight)})
    return layers, histograms


def _as_stored(was: Tensor | None, module: nn.Module) -> Tensor | None:
    """A float weight as the quantized layer holds it: transformers' Conv1D stores its own transposed."""
    if was is None or was.shape == module.weight.shape:
        return was
    return was.T if isinstance(module, QLinear) and was.T.shape == module.weight.shape else None


def histogram(before: Tensor, after: QTensor) -> dict[str, Sequence[float]]:
    """Counts of weights over ``edges``, before and after, and the ``grid``: the distinct weights of one middling group."""
    was, now = before.detach().float().cpu(), after.dequantize(torch.float32).cpu()
    most = float(was.abs().max()) or 1.0
    edges = torch.linspace(-most, most, _BINS + 1)
    size = after.scheme.group_size if after.scheme.group_size > 0 else now.shape[-1]
    groups = now[..., :size].reshape(-1, min(size, now.shape[-1]))
    middling = int(groups.abs().amax(1).median(0).indices)
    counts = [torch.histogram(values.clamp(-most, most).reshape(-1), edges).hist.int().tolist() for values in (was, now)]
    return {"edges": edges.tolist(), "before": counts[0], "after": counts[1], "grid": torch.unique(groups[middling]).tolist()}
