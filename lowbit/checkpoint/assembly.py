"""Stored tensors put into a float model: first everything is compared, then read, and only then anything is changed."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from ..embedding import QEmbedding
from ..experts import relayout_experts
from ..layers import layer_kind, replacement_loses
from ..linear import QLinear
from ..module_attributes import transfer_attributes
from ..packing import unpack
from ..tensor import QTensor
from ..transforms import TRANSFORMS
from .header import Entry
from .inventory import join_name
from .shards import FileSet
from .tensor_file import CheckpointError, Spec

__all__ = ["Assembly"]


class _Slot(NamedTuple):
    """A place for a plain tensor: the parameter or buffer ``name`` of ``module``, called ``path`` in the model."""

    path: str
    module: nn.Module
    name: str
    current: Tensor
    is_buffer: bool


class Assembly:
    """What goes where. Making one compares the files with ``model`` and raises :class:`CheckpointError` with the names of
    tensors that are missing, left over or of another shape; :meth:`read` reads; :meth:`apply` changes the model.

    ``new``: names of tensors that no file has, and that stay as they are."""

    def __init__(self, model: nn.Module, files: FileSet, device: torch.device | None, new: frozenset[str] = frozenset()) -> None:
        self._new = new
        self._model, self._files, self._header, self._device = model, files, files.header, device
        self._specs = files.specs
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._swaps: list[tuple[str, nn.Module]] = []
        self._parameters: list[tuple[str, nn.Module, str, Tensor]] = []  # quantized ones
        self._slots: list[_Slot] = []
        self._kept: list[_Slot] = []
        self._rebound: list[tuple[str, str, _Slot]] = []
        self._tensors: dict[str, Tensor] = {}
        self._packings: dict[str, tuple[int, int] | None] = {}
        self._as_parameters: dict[str, nn.Parameter] = {}
        self._weights: dict[tuple[str, ...], QTensor] = {}
        self._shared = frozenset(self._header.aliases.values())
        self._inserted: dict[str, nn.Module] = {}
        for path, settings in self._header.inserted.items():
            self._outline(path, settings)
        self._visit("", model)
        self._check_names()
        self._check_shared()
        self._check_attributes()

    # ---- comparing -------------------------------------------------------------------------------------------

    def _outline(self, path: str, settings: dict[str, Any]) -> None:
        """Make the module ``path`` that the file has and the model's class does not; it is put into the model at the end."""
        parent, _, leaf = path.rpartition(".")
        kind, given = settings.get("kind"), {name: value for name, value in settings.items() if name != "kind"}
        if not leaf:  # the model itself, which would stand within itself
            self._refuse(path, f"names no place for the {kind!r:.40} that the file has there")
        if kind not in TRANSFORMS:
            self._refuse(path, f"must be one of {', '.join(TRANSFORMS)}, got {kind!r:.40}")
        try:
            home = self._inserted.get(parent) or self._model.get_submodule(parent)
            old = home._modules.get(leaf)
            self._inserted[path] = made = TRANSFORMS[kind].outline(given, old)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._refuse(path, f"is a {kind} with {given!r:.120} in the file, which cannot stand in the model ({error!s:.120})")
        if old is None:
            made.train(home.training)
        elif loses := replacement_loses(old):
            self._refuse(path, f"is a {kind} in the file, and cannot be replaced in the model: {loses}")
        else:
            transfer_attributes(old, made)

    def _visit(self, prefix: str, module: nn.Module) -> None:
        entry = self._header.quantized.get(prefix)
        if entry is not None and entry.kind != "parameter":
            self._check_module(prefix, module, entry)
            self._swaps.append((prefix, module))
            if (transform := self._transform(prefix, module)) is not None:
                self._visit(join_name(prefix, "transform"), transform)
            return
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._visit_parameter(join_name(prefix, name), module, name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self._visit_buffer(_Slot(join_name(prefix, name), module, name, buffer, True))
        for name, child in module._modules.items():
            path = join_name(prefix, name)
            if child is not None and path not in self._inserted:
                self._visit(path, child)
        for path, child in self._inserted.items():
            if path.rpartition(".")[0] == prefix:
                self._visit(path, child)

    def _transform(self, path: str, module: nn.Module) -> nn.Module | None:
        """What is done to the input of the layer ``path``."""
        return self._inserted.get(join_name(path, "transform")) or module._modules.get("transform")

    def _visit_parameter(self, path: str, module: nn.Module, name: str, parameter: Tensor) -> None:
        entry = self._header.quantized.get(path)
        if path in self._new:
            return
        if entry is None:
            self._need(path, Spec(parameter.dtype, tuple(parameter.shape)), any_dtype=True)
            self._slots.append(_Slot(path, module, name, parameter, False))
            return
        if tuple(parameter.shape) != entry.outward:
            self._refuse(path, f"is {list(entry.outward)} in the file and {list(parameter.shape)} in the model")
        self._need_parts(path, entry)
        self._parameters.append((path, module, name, parameter))

    def _visit_buffer(self, slot: _Slot) -> None:
        path, current = slot.path, slot.current
        if path in self._new:
            return
        if slot.name in slot.module._non_persistent_buffers_set:
            stored = self._stored(path)
            if not current.is_meta:  # a buffer that the model computes for itself stays the model's
                self._used.add(path)
                self._kept.append(slot)
                return
            if stored not in self._specs:
                self._refuse(path, "is a buffer on the meta device that the file does not hold: give a model with its buffers")
        self._need(path, Spec(current.dtype, tuple(current.shape)), any_dtype=True)
        self._slots.append(slot)

    def _check_module(self, prefix: str, module: nn.Module, entry: Entry) -> None:
        shape = _matrix_shape(module, entry.kind)
        if shape is None:
            self._refuse(prefix, f"is a quantized {entry.kind} in the file and a {type(module).__name__} in the model")
        if shape != entry.shape:
            self._refuse(prefix, f"is [N, K] = {list(entry.shape)} in the file and {list(shape)} in the model")
        if loses := replacement_loses(module):
            self._refuse(prefix, f"is quantized in the file, and cannot be replaced in the model: {loses}")
        self._need_parts(prefix, entry)
        if entry.bias:
            self._need(join_name(prefix, "bias"), Spec(entry.dtype, entry.shape[:1]), any_dtype=True)
        if entry.input_scale:
            self._need(join_name(prefix, "input_scale"), Spec(torch.float32, ()))

    def _need_parts(self, path: str, entry: Entry) -> None:
        names = entry.names(path)
        for part, spec in entry.parts().items():
            self._need(names[part], spec)

    def _need(self, path: str, want: Spec, any_dtype: bool = False) -> None:
        """The file must hold ``path`` in this shape, and in this dtype unless only a float or only an integer will do."""
        self._used.add(path)
        found = self._specs.get(self._stored(path))
        if found is None:
            self._missing.append(path)
            return
        same_dtype = found.dtype == want.dtype
        if any_dtype:
            same_dtype = found.dtype.is_floating_point == want.dtype.is_floating_point
        if found.shape != want.shape or not same_dtype:
            self._refuse(path, f"is {found} in the file, expected {want}")

    def _check_names(self) -> None:
        header = self._header
        modules = {path for path, _ in self._swaps} | {path for path, *_ in self._parameters}
        if absent := [path for path in header.quantized if path not in modules]:
            self._refuse(absent[0], f"is quantized in the file, and the model has nothing of that name ({len(absent)} such)")
        derived = set(header.nonpersistent)
        names = [*self._specs, *header.aliases]
        unexpected = [name for name in names if name not in self._used and name not in derived]
        for kind, found in (
            ("missing from the file", self._missing),
            ("unexpected, the model has none of that name", unexpected),
        ):
            if found:
                more = f" and {len(found) - 10} more" if len(found) > 10 else ""
                raise CheckpointError(f"{self._files.path(found[0])}: {kind}: {', '.join(found[:10])}{more}")

    def _check_shared(self) -> None:
        """A module that stands at two places has room for one tensor, not for two."""
        locations: dict[tuple[int, str], _Slot] = {}
        for slot in self._slots:
            first = locations.setdefault((id(slot.module), slot.name), slot)
            if self._stored(first.path) != self._stored(slot.path):
                self._refuse(slot.path, f"is the same tensor as {first.path} in the model, and the file holds two")

    def _check_attributes(self) -> None:
        """Tensors that are neither parameters nor buffers have no place in a file; on the meta device they have no numbers."""
        slots = {id(slot.current): slot for slot in self._slots}
        inside = tuple(f"{prefix}." for prefix, _ in self._swaps)
        for prefix, module in self._model.named_modules():
            if prefix.startswith(inside):
                continue
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    if id(value) not in slots:
                        self._refuse(
                            join_name(prefix, name), "is a plain tensor on the meta device: give a model with its numbers"
                        )
                    self._rebound.append((prefix, name, slots[id(value)]))

    def _stored(self, path: str) -> str:
        return self._header.aliases.get(path, path)

    def _refuse(self, path: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._files.path(self._stored(path))}: {path} {reason}")

    # ---- reading ---------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read every tensor that has a place, one at a time, onto the device it goes to."""
        for slot in self._slots:
            self._fetch(slot.path, slot.current)
        for path, module in self._swaps:
            entry = self._header.quantized[path]
            current = next(iter([*module.parameters(recurse=False), *module.buffers(recurse=False)]), torch.empty(0))
            self._fetch_parts(path, entry, current)
            for name, held in (("bias", entry.bias), ("input_scale", entry.input_scale)):
                if held:
                    self._fetch(join_name(path, name), current)
        for path, _, _, current in self._parameters:
            self._fetch_parts(path, self._header.quantized[path], current)

    def _fetch_parts(self, path: str, entry: Entry, like: Tensor) -> None:
        packing = entry.packing()
        for part, name in entry.names(path).items():
            self._fetch(name, like, packing.get(part))

    def _fetch(self, path: str, like: Tensor, packing: tuple[int, int] | None = None) -> None:
        stored = self._stored(path)
        if self._packings.setdefault(stored, packing) != packing:
            self._refuse(path, f"shares the tensor {stored} with another name that has its codes packed otherwise")
        if stored in self._tensors:
            return
        device = self._device or (torch.device("cpu") if like.is_meta else like.device)
        if device.type == "meta":  # an outline: nothing is read for it
            spec = self._specs[stored]
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        else:
            tensor = self._files.read(stored)
        if packing is not None:
            tensor = unpack(tensor, *packing)
        self._tensors[stored] = tensor.to(device)

    # ---- changing --------------------------------------------------------------------------------------------

    def apply(self) -> nn.Module:
        """Put everything in its place. Returns the model, or what replaces it where the model itself was one layer."""
        root = self._model
        for path, module in self._inserted.items():
            parent, _, name = path.rpartition(".")
            self._model.get_submodule(parent)._modules[name] = module
        replaced: dict[tuple[int, str], nn.Module] = {}
        for path, module in self._swaps:
            key = (id(module), self._stored(self._header.quantized[path].names(path)["packed"]))
            if key not in replaced:
                replaced[key] = self._quantized(path, module)
            parent, _, name = path.rpartition(".")
            if not path:
                root = replaced[key]
            else:
                self._model.get_submodule(parent)._modules[name] = replaced[key]
        for path, module, name, _ in self._parameters:
            module._parameters[name] = cast(nn.Parameter, self._weight(path))
        for slot in self._slots:
            if slot.is_buffer:
                slot.module._buffers[slot.name] = self._tensor(slot.path)
            else:
                slot.module._parameters[slot.name] = self._parameter(slot.path, slot.current.requires_grad)
        for slot in self._kept:
            if self._device is not None:
                slot.module._buffers[slot.name] = slot.current.to(self._device)
        for path, name, slot in self._rebound:
            setattr(root.get_submodule(path), name, self._tensor(slot.path))
        relayout_experts(root)
        return root

    def _tensor(self, path: str) -> Tensor:
        return self._tensors[self._stored(path)]

    def _parameter(self, path: str, requires_grad: bool = False) -> nn.Parameter:
        """One object for all names that share a tensor."""
        stored = self._stored(path)
        if stored not in self._as_parameters:
            tensor = self._tensors[stored]
            self._as_parameters[stored] = nn.Parameter(tensor, requires_grad and tensor.dtype.is_floating_point)
        return self._as_parameters[stored]

    def _part(self, path: str) -> Tensor:
        """A part, handed over unless another weight reads it too, for its layout may change."""
        stored = self._stored(path)
        return self._tensors[stored] if stored in self._shared else self._tensors.pop(stored)

    def _weight(self, path: str) -> QTensor:
        """One object for all names that share every part."""
        entry = self._header.quantized[path]
        names = entry.names(path)
        stored = tuple(map(self._stored, names.values()))
        if stored not in self._weights:
            found = {part: self._part(name) for part, name in names.items()}
            parts = (found["packed"].squeeze(-1), found["scale"], found.get("zero_point"), found.get("outer"))
            weight = QTensor(*parts, entry.scheme, entry.shape, entry.dtype, transposed=entry.transposed)
            self._weights[stored] = cast(QTensor, nn.Parameter(weight, requires_grad=False))
        return self._weights[stored]

    def _quantized(self, path: str, module: nn.Module) -> nn.Module:
        entry, weight = self._header.quantized[path], self._weight(path)
        made: nn.Module
        if entry.kind == "embedding":
            made = QEmbedding(weight, getattr(module, "padding_idx", None))
        else:
            bias = self._parameter(join_name(path, "bias"), _wants_grad(module)) if entry.bias else None
            input_scale = self._tensor(join_name(path, "input_scale")) if entry.input_scale else None
            made = QLinear(weight, bias, entry.activation, input_scale, self._transform(path, module))
        transfer_attributes(module, made)
        return made


def _wants_grad(module: nn.Module) -> bool:
    bias = module._parameters.get("bias")
    return bias is not None and bias.requires_grad


def _matrix_shape(module: nn.Module, kind: str) -> tuple[int, ...] | None:
    """[N, K] of a layer that a quantized one of this kind can replace; None for any other."""
    found = layer_kind(module)
    if found is None or (found == "embedding") != (kind == "embedding"):
        return None
    n, k = module.weight.shape  # type: ignore[misc]
    return (k, n) if found == "conv1d" else (n, k)
