"""What a module carries beyond its weight and bias: what goes over to the one that takes its place, and what would be lost."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .embedding import QEmbedding
from .linear import QLinear
from .quantized_module import QuantizedModule
from .scheme import Scheme
from .tensor import QTensor

__all__ = ["MARKS", "SETTINGS", "attributes", "transfer_attributes", "external_references", "lost_attributes", "quantized_names"]

SETTINGS = frozenset({
    "in_features", "out_features", "nf", "nx",
    "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
})  # fmt: skip
"""The attributes of nn.Linear, Conv1D and nn.Embedding, which layers that take their place have too."""

MARKS = frozenset({"_is_hf_initialized", "requires_grad"})
"""What transformers writes on everything that it has filled with numbers, and accelerate on weights that it leaves empty."""

_MODULE = frozenset(vars(nn.Module()))  # what torch keeps in every module
_HOOKS = tuple(name for name in sorted(_MODULE) if name.endswith("_hooks"))


class _Empty(nn.Module):
    """A class that adds nothing."""

    field: int


# Of a class's own names: what Python writes into every class, what makes a float layer, and what prints it.
_NOTHING = frozenset(vars(_Empty)) | {
    "__init__", "__annotations__", "__constants__", "__orig_bases__", "__parameters__", "forward", "reset_parameters",
    "extra_repr", "__repr__",
}  # fmt: skip


def lost_attributes(
    module: nn.Module,
    known: Collection[str],
    reserved: Collection[str],
    base: type[nn.Module] | None = None,
    same: Collection[str] = (),
    hook: Collection[str] = (),
) -> str | None:
    """What another module in the place of ``module`` would not have, as a sentence; None where that is nothing.

    ``known``: parameters, buffers and modules that the other one has, and ``same`` those of them that are the same objects;
    ``reserved``: names that it needs for itself; ``base``: the class whose methods it has, where methods may be called from
    outside; ``hook``: the attributes of a hook of accelerate's, which is handed on (:mod:`lowbit.placement.hooks`).
    What ``forward`` computes is another question (:func:`lowbit.equivalence.computes`).
    """
    attributes_held = [("parameter", [*module._parameters]), ("buffer", [*module._buffers]), ("module", [*module._modules])]
    found = [f"the {kind_of} {name}" for kind_of, names in attributes_held for name in names if name not in known]
    found += _bound(module, reserved, hook)
    others = [parameter for name, parameter in module._parameters.items() if parameter is not None and name not in same]
    forward = "forward" in attributes(module) and "forward" not in hook
    if forward or any(vars(module)[name] for name in _HOOKS) or any(map(_is_hooked, others)):
        found.append("hooks")
    if found:
        behind = ": remove them, and add them again behind quantize_" if found == ["hooks"] else ""
        return f"it carries {_listed(found)}, which a replacement would lose{behind}"
    added = [] if base is None else sorted(_added(type(module), base))
    if base is not None and added:
        return f"{type(module).__name__} adds {_listed(added)} to {base.__name__}, which a replacement would lose"
    return None


def attributes(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of ``module``: no parameters, buffers, modules, hooks, nor what a quantized layer is made of."""
    quantized_own = quantized_names(isinstance(module, nn.Embedding)) if isinstance(module, QuantizedModule) else ()
    attributes_held = {name: value for name, value in vars(module).items() if name not in _MODULE and name not in quantized_own}
    forward = attributes_held.get("forward")
    if getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward:
        del attributes_held["forward"]  # that of its class, which accelerate leaves there where it took a hook off
    return attributes_held


def transfer_attributes(old: nn.Module, new: nn.Module) -> None:
    """Give ``new``, which takes the place of ``old``, its mode, its attributes and those of its weight. :func:`lost_attributes`
    says what stays behind."""
    new.train(old.training)
    vars(new).update({name: value for name, value in attributes(old).items() if name not in vars(new) or name in SETTINGS})
    before, after = old._parameters.get("weight"), new._parameters.get("weight")
    if before is not None and after is not None:
        given = {name: value for name, value in vars(before).items() if name not in vars(after) and name != "requires_grad"}
        vars(after).update(given)


def external_references(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that plain attributes of others hold too, where torch does not see them, and a sentence on it: nothing that takes
    their place would come there."""
    attributes_held: dict[nn.Module, str] = {}
    for prefix, module in model.named_modules():
        for name, value in attributes(module).items():
            several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
            for each in (value, *several):
                found = each.__self__ if isinstance(each, MethodType) else each
                if isinstance(found, nn.Module) and found is not module:
                    home = f"{prefix}.{name}" if prefix else name
                    attributes_held.setdefault(
                        found, f"the attribute {home} holds it too, and would go on holding the float layer"
                    )
    return attributes_held


@functools.cache
def quantized_names(is_embedding: bool) -> frozenset[str]:
    """Every name that a quantized layer, or a quantized embedding, has something under."""
    return frozenset(dir(_example(is_embedding)))


@functools.cache
def _names_of_a_weight() -> frozenset[str]:
    return frozenset(dir(_example(False)._parameters["weight"]))


def _example(is_embedding: bool) -> nn.Module:
    packed, scale = torch.zeros(1, 1, dtype=torch.uint8, device="cpu"), torch.ones(1, 1, dtype=torch.float32, device="cpu")
    weight = QTensor(packed, scale, None, None, Scheme("int8", scale="fp32"), (1, 1))
    return QEmbedding(weight) if is_embedding else QLinear(weight)


def _bound(module: nn.Module, reserved: Collection[str], hook: Collection[str]) -> Iterator[str]:
    """Attributes that the other module has for itself, or that would go on reading the old weight."""
    weight = module._parameters.get("weight")
    for name, value in attributes(module).items():
        if name == "forward" or name in hook:
            continue  # told as a hook
        if name in reserved and name not in SETTINGS:
            yield f"the attribute {name}, a name that the other layer needs"
        elif isinstance(value, MethodType) and value.__self__ is module:
            yield f"the attribute {name}, a method of its own"
        elif isinstance(value, Tensor) and weight is not None and _share_memory(value, weight):
            yield f"the attribute {name}, which lies in the memory of its weight"
    if weight is not None and not isinstance(weight, QTensor):
        taken_by_weights = _names_of_a_weight() - MARKS
        yield from (f"the attribute {name} of its weight" for name in vars(weight) if name in taken_by_weights)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if "meta" in (a.device.type, b.device.type) or torch.strided not in (a.layout, b.layout):
        return a is b
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _is_hooked(parameter: Tensor) -> bool:
    """Whether something waits for gradients of ``parameter``, which a quantized weight has not."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _added(kind: type, base: type) -> set[str]:
    """The names that the classes between ``kind`` and ``base`` bring."""
    return {name for cls in kind.__mro__ if cls not in base.__mro__ for name in vars(cls) if name not in _NOTHING}


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
