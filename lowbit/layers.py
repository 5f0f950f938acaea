"""Finding the layers of a model that can be quantized, and saying why the others cannot."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .adapters import adapters
from .equivalence import computes_standard
from .experts import expert_weights, router_weights
from .module_attributes import external_references, lost_attributes, quantized_names
from .placement.hooks import ATTRIBUTES, execution_device, is_hooked, offloaded, offloaded_in_memory
from .quantized_module import QuantizedModule
from .tensor import QTensor
from .transforms import RMSNorm, Transform, TransformedLinear

__all__ = [
    "MODULES",
    "Layer",
    "find_layers",
    "has_custom_forward",
    "layer_kind",
    "replace_module",
    "replacement_loses",
    "tied_groups",
]

ADAPTER = "an adapter of PEFT, which stays float: merge_and_unload() puts it into the layer's weight"
_KINDS = ("linear", "conv1d", "embedding")
_HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_projection"})


class _Modules(dict[type[nn.Module], str]):
    def __setitem__(self, cls: type[nn.Module], kind: str) -> None:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"a class of modules is registered, got {cls!r:.80}")
        if kind not in _KINDS:
            raise ValueError(f"{cls.__name__} is one of the kinds {', '.join(_KINDS)}, got {kind!r}")
        super().__setitem__(cls, kind)


MODULES = _Modules()
"""Classes of modules from elsewhere, and the kind of layer that each is: see :func:`lowbit.register_module`."""


@dataclass
class Layer:
    """A module with a weight [N, K] that could be quantized, under every name that it has in the model.

    ``unsupported_reason`` says why it cannot be; ``excluded_as`` what it is where rules for everything leave it: an embedding, a
    head, a router, one that transformers keeps. The weight of fused experts is of kind ``"experts"`` and [E, N, K]. Weights that
    no such module holds (convolutions, states) are of kind ``"parameter"``: those that ``name_only_reason`` says something of
    stay, unless a pattern :meth:`~lowbit.recipe.Rule.names` them. ``transposed``: the module has it the other way round.
    """

    names: tuple[str, ...]
    module: nn.Module
    kind: str
    unsupported_reason: str | None
    excluded_as: str = ""
    attribute: str = "weight"
    name_only_reason: str = ""
    transposed: bool = False

    @property
    def is_parameter(self) -> bool:
        """Whether a parameter is quantized in its module, which stays, and not the module replaced."""
        return self.kind in ("experts", "parameter")

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def weight(self) -> Tensor:
        """The float weight [..., N, K], K the dimension that a product sums over."""
        weight = getattr(self.module, self.attribute)
        assert isinstance(weight, Tensor)
        if is_lazy(weight):  # no shape and no bytes yet
            return torch.empty(0, 0, dtype=weight.dtype, device="meta")
        return weight.transpose(-1, -2) if self.transposed else weight

    @property
    def values(self) -> Tensor:
        """:attr:`weight`, read from where a hook of accelerate's keeps it if that offloads it."""
        found = offloaded(self.module, self.attribute) if self.weight.is_meta else None
        if found is None:
            return self.weight
        return found.transpose(-1, -2) if self.transposed else found

    @property
    def home(self) -> torch.device:
        """Where the values of the weight are kept."""
        return torch.device("cpu") if self.weight.is_meta else self.weight.device

    @property
    def device(self) -> torch.device:
        """Where a product with the weight runs."""
        found = execution_device(self.module) if self.weight.is_meta else None
        return self.weight.device if found is None else found

    @property
    def identity(self) -> int:
        """What is equal for layers that read one weight."""
        parameter = self.module._parameters.get(self.attribute)
        stored = offloaded_in_memory(self.module, self.attribute) if parameter is not None and parameter.is_meta else None
        return id(parameter) if stored is None or not stored.numel() else stored.data_ptr()


def find_layers(model: nn.Module) -> list[Layer]:
    """Every linear layer, transformers' Conv1D, embedding and other weight of ``model``, in the order of its modules."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    exclusions, external, added, routers = (
        _default_exclusions(model),
        external_references(model),
        adapters(model),
        router_weights(model),
    )
    layers: list[Layer] = []
    for module, found in names.items():
        kind = layer_kind(module)
        if kind is None:
            layers += _other_weights(module, found, module in added, routers)
        else:
            named = "the head" if kind == "linear" and found[0].rpartition(".")[2] in _HEAD_NAMES else ""
            named = named or routers.get((module, "weight"), "")
            reason = "an embedding" if kind == "embedding" else exclusions.get(module, named)
            unsupported_reason = (
                ADAPTER if module in added else _unsupported_reason(module, kind, found[0]) or external.get(module)
            )
            layers.append(Layer(tuple(found), module, kind, unsupported_reason, reason, transposed=kind == "conv1d"))
            layers += _other_weights(module, found, module in added, routers)
    return layers


def _other_weights(
    module: nn.Module, names: list[str], is_adapter: bool, routers: dict[tuple[nn.Module, str], str]
) -> Iterator[Layer]:
    """The parameters of two or more dimensions beside a layer's weight: experts, and what is quantized by its name alone."""
    if isinstance(module, (ParametrizationList, QuantizedModule)):
        return  # of the first the layer that it belongs to speaks
    is_layer, experts = layer_kind(module) is not None, expert_weights(module)
    for leaf, parameter in module._parameters.items():
        if parameter is None or is_lazy(parameter) or parameter.dim() < 2 or not parameter.is_floating_point():
            continue
        if is_layer and leaf == "weight":
            continue
        unsupported_reason, name_only_reason = _parameter_unsupported_reason(parameter), ""
        if is_adapter:
            unsupported_reason = ADAPTER
        elif is_layer:
            unsupported_reason = f"a parameter of {type(module).__name__} beside its weight"
        elif leaf not in experts:
            reason = f"a parameter of {type(module).__name__}, which is no linear layer, Conv1D or embedding"
            name_only_reason = routers.get((module, leaf), reason)
            if unsupported_reason is not None and not isinstance(parameter, QTensor):
                unsupported_reason = f"{reason}: {unsupported_reason}"
        found = tuple(f"{name}.{leaf}".lstrip(".") for name in names)
        kind, is_transposed = "experts" if leaf in experts else "parameter", experts.get(leaf, False)
        yield Layer(
            found, module, kind, unsupported_reason, attribute=leaf, name_only_reason=name_only_reason, transposed=is_transposed
        )


def _parameter_unsupported_reason(parameter: Tensor) -> str | None:
    if isinstance(parameter, QTensor):
        return f"quantized already ({parameter.scheme})"
    if type(parameter) is not nn.Parameter or parameter.dtype.itemsize < 2:
        return f"it is a {type(parameter).__name__} of {parameter.dtype}, not a float parameter"
    if parameter.dim() > 3:
        return f"it has {parameter.dim()} dimensions: matrices [N, K] and [E, N, K] can be quantized"
    return "it is empty" if parameter.numel() == 0 else None


def replace_module(model: nn.Module, names: tuple[str, ...], module: nn.Module) -> None:
    """Put ``module`` in place under each of ``names``."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)


def _conv1d() -> type[nn.Module] | None:
    # Only a model that was made with transformers can hold one, and then the module is loaded.
    loaded = sys.modules.get("transformers.pytorch_utils")
    return getattr(loaded, "Conv1D", None)


def layer_kind(module: nn.Module) -> str | None:
    """``"linear"``, ``"embedding"`` or ``"conv1d"``; None for a module without such a weight."""
    if (registered := MODULES.get(type(module))) is not None:
        return registered
    conv1d = _conv1d()
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "conv1d" if conv1d is not None and isinstance(module, conv1d) else None


def has_custom_forward(module: nn.Module) -> bool:
    """Whether the layer ``module`` (:func:`layer_kind`) computes something other than layers of its kind do."""
    kind = layer_kind(module)
    assert kind is not None
    if type(module).forward is _base(kind).forward or type(module) in MODULES:
        return False
    return isinstance(module, (QuantizedModule, TransformedLinear)) or not computes_standard(module, kind)


def replacement_loses(module: nn.Module, hook: Collection[str] = ()) -> str | None:
    """What the layer ``module`` is or has that a quantized one in its place would not; or a norm, and an
    :class:`~lowbit.transforms.RMSNorm`; or an inserted module, and another of its kind. None where that is nothing.

    ``hook``: the attributes of a hook that is handed on.
    """
    kind = layer_kind(module)
    if isinstance(module, Transform) and kind is None:
        return lost_attributes(module, {*module._parameters, *module._buffers, *module._modules}, ())
    if kind is None:
        return lost_attributes(module, module._parameters, set(dir(RMSNorm(0.0))) - {"eps"})
    known, base = {"weight"} if kind == "embedding" else {"weight", "bias"}, _base(kind)
    reserved = quantized_names(kind == "embedding")
    if isinstance(module, TransformedLinear):
        return lost_attributes(module, known | {"transform"}, reserved, same=("bias", "transform"))
    if isinstance(module, QuantizedModule):
        return lost_attributes(module, reserved, ())
    if has_custom_forward(module):
        return f"{type(module).__name__} computes something of its own"
    return lost_attributes(module, known, reserved, None if type(module) in MODULES else base, same=("bias",), hook=hook)


def _base(kind: str) -> type[nn.Module]:
    base = {"linear": nn.Linear, "embedding": nn.Embedding, "conv1d": _conv1d()}[kind]
    assert base is not None
    return base


def _default_exclusions(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that rules for everything leave beside embeddings, and what each is."""
    home = sys.modules.get("transformers.modeling_utils")
    if home is not None and any(isinstance(module, home.PreTrainedModel) for module in model.modules()):
        from .pretrained.default_exclusions import default_exclusions

        return default_exclusions(model)
    getter = getattr(model, "get_output_embeddings", None)
    head = None if getter is None else getter()
    return {} if head is None else {head: "the head"}


def _unsupported_reason(module: nn.Module, kind: str, name: str) -> str | None:
    if isinstance(module, QuantizedModule):
        return f"quantized already ({module.scheme})"
    if name == "":
        return "it is the model itself, which cannot be replaced in place: wrap it in nn.Sequential"
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight without calling it"
    if "weight" not in module._parameters:
        return "its weight is not a plain parameter (parametrized?)"
    weight = module._parameters["weight"]
    if weight is not None and is_lazy(weight):
        return "its weight has no shape yet: run the model once before"
    if type(weight) is not nn.Parameter or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"its weight is {type(weight).__name__} of {None if weight is None else weight.dtype}, not a float parameter"
    if getattr(module, "bias", None) is not module._parameters.get("bias"):
        return "its bias is not a plain parameter (parametrized?)"
    if weight.numel() == 0:
        return "its weight is empty"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm changes the weight as it is used"
    return replacement_loses(module, hook=ATTRIBUTES if is_hooked(module) else ())


def tied_groups(layers: list[Layer]) -> list[list[int]]:
    """The places in ``layers`` of those that read one parameter, two or more together, in their order."""
    groups: dict[int, list[int]] = {}
    for i, layer in enumerate(layers):
        if layer.module._parameters.get(layer.attribute) is not None:
            groups.setdefault(layer.identity, []).append(i)
    return [group for group in groups.values() if len(group) > 1]
