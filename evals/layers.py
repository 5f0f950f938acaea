"""What quantization did to each layer: signal over rounding noise, weights before and after, and bytes by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import QTensor
from lowbit.checkpoint.inventory import Inventory
from lowbit.grid import Scales, scale_values
from lowbit.layers import Layer, find_layers, tied_groups

__all__ = ["float_weights", "histogram", "layer_figures", "size_of", "sqnr"]

BINS = 80
"""Of a histogram."""
DRAWN = 3
"""Layers with a histogram: the first, the last and one between them."""
_BLOCK = 1 << 21  # weights that are float64 at a time: 16 MiB, and a few times that while they are compared


def size_of(model: nn.Module) -> dict[str, int]:
    """Bytes of the tensors that :func:`lowbit.save` would write: packed ``"codes"``; ``"scales"`` with zero points and outer
    scales; and everything else, ``"float"``. A tensor that has several names counts once. Writes nothing."""
    inventory = Inventory(model)
    kinds = {"packed": "codes", "scale": "scales", "zero_point": "scales", "outer": "scales"}
    parts = {name: kinds[part] for path, entry in inventory.header.quantized.items() for part, name in entry.names(path).items()}
    sizes = {"codes": 0, "scales": 0, "float": 0}
    for tensor in inventory.tensors:
        sizes[parts.get(tensor.name, "float")] += tensor.spec.nbytes
    return sizes


def float_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights [..., N, K] of a float model under every name of their layers: the model's own memory, no copies.

    Taken before :func:`lowbit.quantize_`, which replaces them, it keeps them alive.
    """
    layers = [layer for layer in find_layers(model) if not isinstance(layer.weight, QTensor)]
    return {name: layer.weight.detach() for layer in layers for name in layer.names}


def layer_figures(
    model: nn.Module, before: Mapping[str, Tensor], *, drawn: int = DRAWN, progress: Callable[[int, int], None] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Figures of the quantized layers of ``model``, one at a time, and histograms of some.

    Args:
        model: the quantized model.
        before: the float weight of each layer by its name, as :func:`float_weights` gives it; a mapping that reads a weight
            from a file when it is asked for will do. A layer that it does not hold has no figure (None).
        drawn: layers with a histogram, evenly from the first to the last, so that all recipes show the same ones.
        progress: called with (layers done, layers in all).

    Returns ``{"name", "kind", "shape", "scheme", "bits_per_weight", "sqnr_db"}`` of each layer, and :func:`histogram` with
    the ``"name"`` of ``drawn`` of them. Layers that share a weight are one. ``sqnr_db`` is None where nothing was lost, since
    JSON has no infinity, and is distance from ``before``: a method that changes weights first, to the same outputs, is not
    told by it.

    Raises ``ValueError`` for a float weight of another shape.
    """
    layers = _quantized(model)
    known = [i for i, layer in enumerate(layers) if any(name in before for name in layer.names)]
    last = len(known) - 1
    shown = {known[round(place * last / max(drawn - 1, 1))] for place in range(drawn)} if known else set()
    figures, histograms = [], []
    for i, layer in enumerate(layers):
        weight = layer.weight
        assert isinstance(weight, QTensor)
        name = next((name for name in layer.names if name in before), None)
        was = None if name is None else before[name]
        decibels = math.inf if was is None else sqnr(was, weight, layer.name)
        figures.append(
            {
                "name": layer.name,
                "kind": layer.kind,
                "shape": list(weight.shape),
                "scheme": str(weight.scheme),
                "bits_per_weight": weight.bits_per_weight,
                "sqnr_db": decibels if math.isfinite(decibels) else None,
            }
        )
        if was is not None and i in shown:
            histograms.append({"name": layer.name, **histogram(was, weight)})
        if progress is not None:
            progress(i + 1, len(layers))
    return figures, histograms


def sqnr(before: Tensor, after: QTensor, name: str = "weight") -> float:
    """Energy of ``before`` over that of ``after - before`` in dB, in float64, a block of rows at a time.

    Infinity where nothing was lost, minus infinity where zeros became something else. Raises ``ValueError`` with ``name``
    for different shapes.
    """
    if before.shape != after.shape:
        raise ValueError(f"{name}: the float weight is {tuple(before.shape)} and the quantized one {tuple(after.shape)}")
    signal = noise = 0.0
    for was, now in _blocks(before, after):
        signal += float(was.square().sum())
        noise += float((now - was).square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def histogram(before: Tensor, after: QTensor, bins: int = BINS) -> dict[str, list[float]]:
    """How weights are spread before and after quantizing, and the grid that they were rounded to.

    Returns ``"edges"`` (``bins`` + 1, equally far apart), counts ``"before"`` and ``"after"`` between them, and ``"grid"``: the
    numbers of the format, at most 256, less the median zero point and times the median scale, ascending.

    The edges span one and a half times that grid and no less than five times the mean magnitude, or what there is of it:
    a few outliers would otherwise leave all other weights one bin. Weights beyond them are counted in the outermost bins.
    """
    grid = _grid(after)
    low, high = _span(before, after, grid)
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64, device=after.device)
    counts = torch.zeros(2, bins, dtype=torch.int64)
    for pair in _blocks(before, after):
        for side, values in enumerate(pair):
            places = torch.bucketize(values.flatten(), edges, right=True, out_int32=True).sub_(1).clamp_(0, bins - 1)
            counts[side] += torch.bincount(places, minlength=bins).cpu()
    return {"edges": edges.tolist(), "before": counts[0].tolist(), "after": counts[1].tolist(), "grid": grid}


# ---- parts -----------------------------------------------------------------------------------------------------------


def _quantized(model: nn.Module) -> list[Layer]:
    """Layers with a quantized weight, of those that share one the first."""
    layers = [layer for layer in find_layers(model) if isinstance(layer.weight, QTensor)]
    tied = {i for group in tied_groups(layers) for i in group[1:]}
    return [layer for i, layer in enumerate(layers) if i not in tied]


@torch.no_grad()
def _blocks(before: Tensor, after: QTensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both weights in float64 on the device of the quantized one, some rows (or matrices) at a time."""
    plain, count = after.canonical(), max(1, _BLOCK // max(math.prod(after.shape[1:]), 1))
    for start in range(0, len(after), count):
        rows = slice(start, start + count)
        yield before[rows].detach().to(after.device).double(), plain[rows].dequantize(torch.float64)


def _grid(weight: QTensor) -> list[float]:
    plain = weight.canonical()
    scale = scale_values(plain.scheme, Scales(plain.scale, plain.zero_point, plain.outer))
    zero = 0.0 if plain.zero_point is None else float(plain.zero_point.float().median())
    step = float(scale.median())  # below zero where scales are in a format of which nobody would think
    return sorted((number - zero) * step for number in plain.scheme.fmt.numbers)


def _span(before: Tensor, after: QTensor, grid: list[float]) -> tuple[float, float]:
    lowest, highest, size = math.inf, -math.inf, 0.0
    for was, now in _blocks(before, after):
        lowest, highest = min(lowest, float(was.min()), float(now.min())), max(highest, float(was.max()), float(now.max()))
        size += float(was.abs().sum())
    usual = 5 * size / max(before.numel(), 1)
    low, high = max(lowest, min(1.5 * grid[0], -usual)), min(highest, max(1.5 * grid[-1], usual))
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) / 2 or 1.0  # a single number, up to rounding: edges on both sides of it
    return low - room, low + room
