"""A rotated residual stream without a changed weight: hooks rotate what is written to it and undo that for what reads it.

If the model then gives something else, no weights could make it right, and nothing has been touched.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..calibration.blocks import call
from ..calibration.data import Batch
from ..calibration.pytree import tree_leaves, tree_map
from ..layers import layer_kind
from .hadamard import Rotation
from .residual_stream import ResidualStream

__all__ = ["SAME", "check_outputs", "distance", "outputs", "rotated_difference"]

SAME = 1e-5
"""The largest difference of an output, relative to its largest number, that counts as rounding in float32."""


def rotated_difference(model: nn.Module, batch: Batch, device: Any, stream: ResidualStream, rotation: Rotation) -> float:
    """What rotated activations change in what ``model`` gives; see :func:`distance`."""
    reference = outputs(call(model, batch, device))
    with _rotated(model, stream, rotation):
        return distance(reference, outputs(call(model, batch, device)))


def check_outputs(model: nn.Module, batch: Batch, device: Any, stream: ResidualStream, rotation: Rotation) -> None:
    """Raise ``ValueError`` that names the first layer to differ where rotated activations change what the model gives."""
    found = rotated_difference(model, batch, device, stream, rotation)
    if found <= SAME:
        return
    before, after = _layer_outputs(model, batch, device), {}
    with _rotated(model, stream, rotation):
        after = _layer_outputs(model, batch, device)
    places = [name for name in before if name not in stream.writers and name in after]
    first = next((name for name in places if not distance(before[name], after[name]) <= SAME), None)
    where = "in none of its layers" if first is None else f"first in {first}"
    raise ValueError(
        f"rotation would change what the model gives, by {found:.1e} of its largest output, {where}: something beside norms and "
        "layers looks at its residual stream. The model is as it was"
    )


@contextlib.contextmanager
def _rotated(model: nn.Module, stream: ResidualStream, rotation: Rotation) -> Iterator[None]:
    """Within the block the stream is rotated, by hooks on what reads and writes it."""
    centres = stream.centres

    def input_hook(name: str) -> Any:
        norm = stream.norms.get(stream.readers[name])

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            first = iter([True])

            def rotated(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not next(first, False):
                    return leaf
                x = rotation.invert(leaf.double())
                return (x if norm is None else x * norm.gain.to(x) + norm.bias.to(x)).to(leaf.dtype)

            return tree_map((args, kwargs), rotated)

        return hook

    def output_hook(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            places = iter(range(1 << 30))

            def rotated(leaf: Any) -> Any:
                if next(places) not in stream.writers[name]:
                    return leaf
                x = leaf.double()
                return rotation.apply(x - x.mean(-1, keepdim=True) if centres else x).to(leaf.dtype)

            return tree_map(output, rotated)

        return hook

    def norm_hook(name: str) -> Any:
        norm = stream.norms[name]
        inside = [False]

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if inside[0]:  # it calls the module, and so this hook
                return None
            inside[0] = True
            try:
                return norm.plain(args[0]).to(output.dtype)
            finally:
                inside[0] = False

        return hook

    with contextlib.ExitStack() as hooks:
        for name in stream.readers:
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(input_hook(name), with_kwargs=True).remove)
        for name in stream.writers:
            hooks.callback(model.get_submodule(name).register_forward_hook(output_hook(name)).remove)
        for name in stream.norms:
            hooks.callback(model.get_submodule(name).register_forward_hook(norm_hook(name)).remove)
        yield


def outputs(output: Any) -> list[Tensor]:
    """The float tensors of what a model gives, in float64 on the CPU."""
    return [leaf.double().cpu() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _layer_outputs(model: nn.Module, batch: Batch, device: Any) -> dict[str, list[Tensor]]:
    """What each layer gives, in the order in which they are first called."""
    found: dict[str, list[Tensor]] = {}

    def record_hook(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found.setdefault(name, []).extend(outputs(output))

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if layer_kind(module) is not None:
                hooks.callback(module.register_forward_hook(record_hook(name)).remove)
        call(model, batch, device)
    return found


def distance(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference, relative to the largest finite number; infinities in the same places do not differ."""
    if [x.shape for x in before] != [x.shape for x in after]:
        return math.inf
    found = 0.0
    for x, y in zip(before, after, strict=True):
        finite = x[x.isfinite()].abs()
        apart = (x - y)[x != y].abs()
        top = float(finite.amax()) if finite.numel() else 0.0
        worst = float(apart.amax()) if apart.numel() else 0.0
        if not math.isfinite(worst):
            return math.inf
        found = max(found, worst / top if top > 0 else worst)
    return found
