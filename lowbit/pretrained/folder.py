"""A quantized folder through transformers' loader: the model's outline before, names and widths while, ties after.

transformers reads the tensors, so that device maps, offloading and its progress bar work as ever. Before it does, the
headers of the files are compared with the model, and anything missing, left over or unknown raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from ..checkpoint.assembly import Assembly
from ..checkpoint.header import Entry, Header
from ..checkpoint.hf_config import float_dtype
from ..checkpoint.inventory import join_name
from ..checkpoint.shards import FileSet, open_files
from ..checkpoint.tensor_file import CheckpointError
from ..experts import relayout_experts
from ..quantized_module import QuantizedModule
from .class_mapping import is_other_class, with_names_of
from .default_exclusions import apply_fp32_modules
from .parallel import is_shared, quantized_parameters, read_unsharded
from .parts import WeightParts
from .ties import set_ties

__all__ = ["Folder"]


class Folder:
    """Makes of ``model``, a float model on the meta device, the outline of what ``files`` hold.

    A tensor keeps the dtype of the file unless from_pretrained was asked for a dtype other than the folder's; codes and
    scales keep theirs whatever was asked for.

    Raises :class:`~lowbit.CheckpointError` that names file and tensor for what :func:`lowbit.load` would refuse.
    """

    def __init__(self, model: Any, files: Sequence[str] | None) -> None:
        if not files:
            raise CheckpointError("a quantized model is loaded from a folder: give from_pretrained its path, and no state_dict")
        folder = Path(files[0]).parent
        apply_fp32_modules(model, model.config.dtype)
        wanted = {name: tensor.dtype for name, tensor in _tensors(model)}
        with open_files(folder) as opened:
            self._entries, self._extra = opened.header.quantized, opened.header.nonpersistent
            new: frozenset[str] = frozenset()
            if is_other_class(model, opened.header):
                opened, new = with_names_of(model, opened, folder)
            self._header = opened.header
            _fill(model, opened, new)
            held = opened.specs
            names = [name for name in _computed(model) if self._stored(name) in held]
            self._buffers = {name: opened.read(self._stored(name)) for name in names}
        self._as_stored = _stored_dtype(folder, self._header) in (None, model.config.dtype)
        if not self._as_stored:
            _cast(model, wanted)
        self._fixed = {join_name(path, "input_scale") for path, entry in self._header.quantized.items() if entry.input_scale}
        self._sizes = {_named(path, entry): _element_size(entry) for path, entry in self._header.quantized.items()}
        self._prepare(model)
        shared = quantized_parameters(model) if is_shared(model) else []
        self._reading = read_unsharded(shared)
        for module, name in shared:  # a plan has a place for each weight; those that are one are tied again once they are read
            module._parameters[name] = nn.Parameter(getattr(module, name).detach(), requires_grad=False)

    def _stored(self, name: str) -> str:
        return self._header.aliases.get(name, name)

    def _prepare(self, model: Any) -> None:
        """What transformers would otherwise look for in the files, or in vain."""
        for module in model.modules():
            if isinstance(module, QuantizedModule):
                module._is_hf_initialized = True
        known, aliases = set(model.state_dict()), self._header.aliases
        set_ties(model, {name: stored for name, stored in aliases.items() if name in known})
        self._ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {
            rf"^{re.escape(name)}$" for name in (*self._extra, *self._header.nonpersistent, *self._buffers)
        }

    def conversions(self) -> list[WeightConverter]:
        return [WeightParts(self._entries, self._header.quantized)]

    conversion = None

    def is_quantized_here(self, name: str) -> bool:
        """Whether transformers is to have ``conversion`` done to the parameter ``name`` of the file."""
        return False

    def keeps_dtype(self, converter: Any) -> bool:
        """Whether the tensors that ``converter`` takes keep their dtype."""
        return self._as_stored or isinstance(converter, WeightParts) or converter.target_patterns[0] in self._fixed

    def element_size(self, name: str) -> float | None:
        return self._sizes.get(name)

    def finish(self, model: Any) -> None:
        """Layouts for the device, buffers that no ``state_dict`` has, and the model's own ways again."""
        for handle in self._reading:
            handle.remove()
        if self._ignored is type(model)._keys_to_ignore_on_load_unexpected:
            del model._keys_to_ignore_on_load_unexpected
        else:
            model._keys_to_ignore_on_load_unexpected = self._ignored
        for name, tensor in self._buffers.items():
            parent, _, leaf = name.rpartition(".")
            module = model.get_submodule(parent)
            module._buffers[leaf] = tensor.to(module._buffers[leaf].device)
        for module in model.modules():
            if isinstance(module, QuantizedModule):
                module._relayout()
        relayout_experts(model)
        if self._as_stored:
            model.config.dtype = float_dtype(model)


def _named(path: str, entry: Entry) -> str:
    """What the model calls the weight."""
    return path if entry.kind == "parameter" else join_name(path, "weight")


def _element_size(entry: Entry) -> float:
    """Bytes of a value of the weight."""
    return entry.scheme.bits_per_weight(max(entry.shape[-1], 1)) / 8


def _fill(model: nn.Module, files: FileSet, new: frozenset[str]) -> None:
    assembly = Assembly(model, files, torch.device("meta"), new)
    assembly.read()
    assembly.apply()


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _computed(model: nn.Module) -> list[str]:
    """The buffers that a model makes for itself, and that no ``state_dict`` has."""
    return [join_name(path, name) for path, module in model.named_modules() for name in module._non_persistent_buffers_set]


def _stored_dtype(folder: Path, header: Header) -> torch.dtype | None:
    """The dtype that the folder's own config.json names, or that of its first float weight."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) if (folder / "config.json").is_file() else {}
    found = getattr(torch, str(content.get("dtype", content.get("torch_dtype"))), None)
    return found if isinstance(found, torch.dtype) else next((entry.dtype for entry in header.quantized.values()), None)


def _cast(model: nn.Module, wanted: dict[str, torch.dtype]) -> None:
    """Give the outline the dtype that was asked for, where it is not a quantized weight's."""
    for prefix, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            module.to(wanted[join_name(prefix, "weight")])
            continue
        for name, parameter in module._parameters.items():
            path = join_name(prefix, name)
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != wanted[path]:
                empty = torch.empty_like(parameter, dtype=wanted[path])
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            path = join_name(prefix, name)
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = torch.empty_like(buffer, dtype=wanted[path])
