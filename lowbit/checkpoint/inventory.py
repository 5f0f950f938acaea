"""What a model holds, as it is to be stored: every tensor once, the names that share one, an entry a quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..embedding import QEmbedding
from ..linear import QLinear
from ..packing import pack
from ..placement.hooks import resident
from ..quantized_module import QuantizedModule
from ..scheme import PLAIN_SCALES
from ..tensor import QTensor
from ..transforms import Transform
from .header import Entry, Header
from .tensor_file import Spec, Stored, storable

__all__ = ["Inventory", "join_name", "part_as_stored"]


class _Item(NamedTuple):
    """A tensor to be stored. ``source``: the memory it is made from, by which two names are found to share it."""

    name: str
    spec: Spec
    source: Tensor
    value: Callable[[], Tensor]


class Inventory:
    """The ``tensors`` of ``model`` and the ``header`` that describes them.

    What hooks of accelerate's keep elsewhere is read from there. ``absent(name)`` gives a tensor that the model has on the meta
    device alone, as it is to be stored; tensors are then shared that are one object.

    Raises ``ValueError`` that names what a file cannot hold: tensors on the meta device, sparse ones, the shards of a
    DTensor, a flat view of a quantized weight, a module's own extra state; and weights that the model has divided for inference.
    """

    def __init__(self, model: nn.Module, absent: Callable[[str], Tensor] | None = None) -> None:
        self.tensors: list[Stored] = []
        self._absent = absent
        self._sources: list[Tensor] = []  # what is told apart by its identity has to live
        self.header = Header(model={"class": type(model).__name__})
        self._kept: dict[Any, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            _refuse_divided(prefix, module)
            for item in self._module_items(prefix, module):
                self._add(item)

    def _add(self, item: _Item) -> None:
        source = item.source
        place: Any = id(source)
        self._sources.append(source)
        if source.is_meta and self._absent is not None:
            item = item._replace(value=partial(self._absent, item.name))
        elif source.numel():
            place = (source.device, source.data_ptr(), source.dtype, tuple(source.shape), source.stride())
            place += source.is_conj(), source.is_neg()  # numbers that the same bytes stand for by a flag of the view
        first = self._kept.setdefault((place, item.spec), item.name)
        if first == item.name:
            self.tensors.append(Stored(item.name, item.spec, item.value))
        else:
            self.header.aliases[item.name] = first

    def _module_items(self, prefix: str, module: nn.Module) -> Iterator[_Item]:
        covered: tuple[str, ...] = ()
        if isinstance(module, Transform):
            self.header.inserted[prefix] = {"kind": module.kind, **module.settings}
        if isinstance(module, (QLinear, QEmbedding)):
            entry, weight = _module_entry(module), resident(module, "weight", module.weight)
            if not isinstance(weight, QTensor):
                raise ValueError(
                    f"{join_name(prefix, 'weight')} is a {type(weight).__name__}: gather what processes share before saving, or "
                    "save the model that one process loaded"
                )
            self.header.quantized[prefix] = entry
            yield from self._weight_items(prefix, weight, entry)
            covered = ("weight",)
        elif isinstance(module, QuantizedModule) or type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"{prefix or 'the model'}: a {type(module).__name__} has state of its own that no file can hold")
        for name, parameter in module._parameters.items():
            if parameter is None or name in covered:
                continue
            path, parameter = join_name(prefix, name), resident(module, name, parameter)  # type: ignore[assignment]
            if isinstance(parameter, QTensor):
                if parameter.flat or parameter.dim() < 2:
                    raise ValueError(f"{path}: a parameter [..., N, K] can be stored, got {parameter!r}")
                stored = parameter._stored_shape
                entry = Entry("parameter", parameter.scheme, stored, parameter.dtype, transposed=parameter.transposed)
                self.header.quantized[path] = entry
                yield from self._weight_items(path, parameter, entry)
            else:
                yield self._plain_item(path, parameter)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            path = join_name(prefix, name)
            if name in module._non_persistent_buffers_set:
                self.header.nonpersistent.append(path)
            yield self._plain_item(path, resident(module, name, buffer))

    def _weight_items(self, prefix: str, weight: QTensor, entry: Entry) -> Iterator[_Item]:
        names = entry.names(prefix)
        for part, spec in entry.parts().items():
            name, source = names[part], getattr(weight, part)
            _check(name, source, self._absent is not None)
            yield _Item(name, spec, source, partial(part_as_stored, weight, part))

    def _plain_item(self, name: str, tensor: Tensor) -> _Item:
        _check(name, tensor, self._absent is not None)
        return _Item(name, Spec(tensor.dtype, tuple(tensor.shape)), tensor, lambda: tensor.resolve_conj().resolve_neg())


def join_name(prefix: str, name: str) -> str:
    """The name of what ``name`` is in the module at ``prefix``, which is empty for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def _module_entry(module: QLinear | QEmbedding) -> Entry:
    shape = tuple(module.weight.shape)
    if isinstance(module, QEmbedding):
        return Entry("embedding", module.scheme, shape, module.weight.dtype)
    bias, input_scale = module.bias is not None, module.input_scale is not None
    return Entry("linear", module.scheme, shape, module.weight.dtype, bias, module.activation, input_scale)


def part_as_stored(weight: QTensor, part: str) -> Tensor:
    """A part in its canonical form, codes packed: zero points of a format, and scales where they are codes."""
    tensor: Tensor = getattr(weight.canonical(), part).detach()
    scheme = weight.scheme
    if part == "packed":
        return tensor.unsqueeze(-1)
    if part == "zero_point" and scheme.zero_point == "int":
        return pack(tensor, scheme.bits)
    if part == "scale" and scheme.scale not in PLAIN_SCALES:
        return pack(tensor, scheme.scale_bits)
    return tensor


def _refuse_divided(prefix: str, module: nn.Module) -> None:
    """RWKV divides weights of its later blocks when it first runs in evaluation mode, and whoever loads them does so again."""
    every = getattr(getattr(module, "config", None), "rescale_every", 0)
    if getattr(module, "layers_are_rescaled", False) and 0 < every < len(getattr(module, "blocks", ())):
        raise ValueError(
            f"{prefix or 'the model'}: a {type(module).__name__} has divided weights for inference, which would be done again "
            "to what is loaded: run it once in training mode before saving it, or set config.rescale_every = 0 before it runs"
        )


def _check(name: str, tensor: Tensor, may_be_absent: bool) -> None:
    if name == "__metadata__":
        raise ValueError(f"no tensor of a safetensors file can be called {name}: rename it")
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name} has no shape yet: run the model once before saving it")
    if tensor.device.type == "meta" and not may_be_absent:
        raise ValueError(f"{name} is on the meta device and has no numbers: load the model's weights before saving it")
    if is_traceable_wrapper_subclass(tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: gather it into a plain tensor before saving")
    if tensor.layout != torch.strided or not storable(tensor.dtype):
        raise ValueError(
            f"{name} is {tensor.layout} {tensor.dtype}, which safetensors cannot hold: make it a dense number tensor"
        )
