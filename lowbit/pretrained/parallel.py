"""Quantized weights that processes share by a plan of transformers' (``tp_plan``): each is put together whole, and then cut.

transformers would cut what a file holds by the shape of each tensor: parts of a weight have other shapes than the weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ..checkpoint.inventory import join_name
from ..embedding import QEmbedding
from ..linear import QLinear
from ..plans import LayerPlan
from ..rounding import round_weight
from ..scheme import Scheme
from ..tensor import QTensor

__all__ = ["Rounding", "adapt_plan", "check_plan", "cut", "is_shared", "quantized_parameters", "read_unsharded"]


def is_shared(model: Any) -> bool:
    """Whether ``model``, which is being loaded, is to be shared by processes that multiply together."""
    return getattr(getattr(model.config, "distributed_config", None), "tp_size", 1) > 1


def quantized_parameters(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where ``model`` has quantized weights: each module, and the name of the parameter."""
    places = ((module, name, parameter) for module in model.modules() for name, parameter in module._parameters.items())
    return [(module, name) for module, name, parameter in places if isinstance(parameter, QTensor)]


def read_unsharded(places: Iterable[tuple[nn.Module, str]]) -> list[Any]:
    """Let transformers read what the weights at ``places`` are made of whole; handles, to remove once it is loaded.

    What it cuts is what is a DTensor in the ``state_dict`` of the model.
    """
    return [module.register_state_dict_post_hook(partial(_without_shards, name)) for module, name in places]


def _without_shards(name: str, module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    weight: Any = state.get(prefix + name)
    if weight is not None and hasattr(weight, "_local_tensor"):
        state[prefix + name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def cut(weight: QTensor, like: Any, name: str, activation: Scheme | None = None) -> QTensor:
    """What this process holds of ``weight`` [..., N, K], that of ``name``, by the placements of the DTensor ``like``.

    Raises ``ValueError`` where the columns of a layer that rounds x with a scale a token would be shared.
    """
    for i, placement in enumerate(like.placements):
        if not hasattr(placement, "dim"):
            continue
        dim, size, rank = placement.dim % weight.dim(), like.device_mesh.size(i), like.device_mesh.get_local_rank(i)
        if dim == weight.dim() - 1 and activation is not None:
            raise ValueError(
                f"{name}: x is rounded to {activation} with a scale for all columns of a token, and the plan shares the weight's "
                "columns among processes (rowwise): quantize this layer for float activations, or leave it out of the plan"
            )
        fused = torch.chunk(
            weight, getattr(placement, "split_factor", 1), dim
        )  # weights that lie in one, each of which is shared
        pieces = [torch.chunk(each, size, dim)[rank] for each in fused]
        weight = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)  # type: ignore[assignment]
    return weight


class Rounding(ConversionOps):
    """A float weight, read whole, to what this process holds of the quantized one. ``entries``: the plan, by names of weights."""

    def __init__(self, entries: dict[str, LayerPlan]) -> None:
        self.entries = entries

    def convert(
        self, input_dict: dict[str, Any], *args: Any, full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The weight as a parameter, in the dtype of the model's outline."""
        (found,) = input_dict.values()
        entry, outline = self.entries[full_layer_name], model.get_parameter(full_layer_name)
        dense = found[0] if isinstance(found, list) else found
        assert entry.config is not None
        weight = round_weight(dense.t() if entry.kind == "conv1d" else dense, entry.config, dtype=outline.dtype).weight
        if hasattr(outline, "_local_tensor"):
            weight = cut(weight, outline, entry.name, entry.config.activation)
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


# ---- plans -------------------------------------------------------------------------------------------------------

_GATHERED = "lowbit_gathered"
_BY_ROWS = {"rowwise": _GATHERED, "rowwise_split_input": "colwise_gather_output", "rowwise_rep": "colwise_gather_output"}


def adapt_plan(model: Any, plan: dict[str, str]) -> None:
    """Let layers that round x with a scale a token share their rows where ``plan`` shares columns: a token's scale is that of all
    its columns, which are gathered for it."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    weights_to_gather = {
        replace_layer_number_by_wildcard(name)
        for name, module in model.named_modules()
        if isinstance(module, QLinear) and module.activation is not None and module.input_scale is None
    }
    for name in weights_to_gather:
        if plan.get(name) in _BY_ROWS:
            _register()
            plan[name] = _BY_ROWS[plan[name]]


def check_plan(model: Any, plan: dict[str, str], processes: int) -> None:
    """Raises ``ValueError`` that names a layer which ``processes`` cannot share as ``plan`` has it."""
    from transformers.distributed.parallel_utils import _get_parameter_plan

    for prefix, module in model.named_modules():
        for leaf, weight in module._parameters.items():
            name = prefix if leaf == "weight" else join_name(prefix, leaf)
            style = _get_parameter_plan(join_name(prefix, leaf), plan) if isinstance(weight, QTensor) else None
            dim = None if style is None else _shared_dim(module, weight, style)
            if style is None or weight is None or dim is None:
                continue
            try:
                pieces = 2 * processes if style.startswith("packed") else processes
                if weight.shape[dim] % pieces:
                    what = "columns" if dim == weight.dim() - 1 else "rows"
                    raise ValueError(f"{what} of {tuple(weight.shape)} are not shared evenly by {processes} processes")
                torch.chunk(weight, pieces, dim)
            except ValueError as error:
                raise ValueError(
                    f"{name}, {weight.scheme_str}, cannot be shared by {processes} processes as tp_plan has it ({style}): "
                    f"{error}; "
                    "use another number of processes, or leave this layer as it is (None in the recipe)"
                ) from error


def _shared_dim(module: nn.Module, weight: Any, style: str) -> int | None:
    """The dimension of ``weight`` that ``style`` shares; None for none."""
    if isinstance(module, QEmbedding):
        return int("colwise" in style)
    if "rowwise" in style:
        return int(weight.dim() - 1)
    return weight.dim() - 2 if "colwise" in style or style == _GATHERED else None


def _register() -> None:
    from torch.distributed.tensor import DTensor, Replicate
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import ColwiseParallel

    class Gathered(ColwiseParallel):
        """Rows of a linear layer whose input comes in columns, from a layer before it, and whose output is whole."""

        def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
            x = args[0]
            if not isinstance(x, DTensor):
                x = self._from_local_last_dim_shard(x, mesh, module.in_features)  # type: ignore[no-untyped-call]
            x = x.redistribute(placements=[Replicate()])
            if self.should_use_local_tensors(module):  # type: ignore[no-untyped-call]
                x = x.to_local()
            return super().transform_inputs_pre_forward(module, (x, *args[1:]), kwargs, mesh)  # type: ignore[no-untyped-call]

    if _GATHERED not in ALL_PARALLEL_STYLES:
        style: Any = Gathered(input_layouts=Replicate(), output_layouts=Replicate())
        ALL_PARALLEL_STYLES.register(_GATHERED, style)
