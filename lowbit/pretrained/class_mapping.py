"""A quantized folder read by another class than the one that it was saved from, by transformers' own rules for float folders.

The prefix of the base model is put before names or taken off where the model then has them; what the class does not have is left,
and transformers reports it; what is new in the class (a head for classification) is initialised, and reported too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.assembly import Assembly
from ..checkpoint.header import Entry, Header
from ..checkpoint.hf_config import build_on_meta
from ..checkpoint.inventory import join_name
from ..checkpoint.shards import FileSet
from ..checkpoint.tensor_file import CheckpointError
from .float_folder import is_new

__all__ = ["is_other_class", "with_names_of"]


def is_other_class(model: Any, header: Header) -> bool:
    """Whether the files of ``header`` were saved from a model of another class than that of ``model``."""
    return header.model.get("class", type(model).__name__) != type(model).__name__


def with_names_of(model: Any, files: FileSet, folder: Path) -> tuple[FileSet, frozenset[str]]:
    """``files`` under the names that ``model``, an outline, has for what they hold, and the names of its tensors that are new.

    Raises :class:`CheckpointError` for files that are not whole as what the config.json of ``folder`` describes, and for tensors
    that they lack and that are not new by the class of ``model``.
    """
    saved_model = build_on_meta(folder)
    Assembly(saved_model, files, torch.device("meta"))
    found = _Names(model, files)
    header = Header(
        {path: entry for old, entry in files.header.quantized.items() if (path := found.module(old, entry)) is not None},
        {name: home for name, home in found.new_paths.items() if name != home},
        [name for old in files.header.nonpersistent if (name := found.tensor(old)) is not None],
        files.header.model,
        {path: settings for old, settings in files.header.inserted.items() if (path := found.inserted(old)) is not None},
    )
    _tie(model, header, found.new_paths)
    held = {*found.new_paths, *header.aliases}
    new = frozenset(name for name in found.model_names if name not in held and not _is_quantized(name, header))
    still_missing = sorted(name for name in new if name not in found.computed and not is_new(name, model, saved_model))
    if still_missing:
        more = f" and {len(still_missing) - 3} more" if still_missing[3:] else ""
        raise CheckpointError(
            f"{files.path('model')}: missing from the file: {', '.join(still_missing[:3])}{more} (the folder holds a "
            f"{type(saved_model).__name__}, and this is a {type(model).__name__})"
        )
    return files.renamed({home: found.raw[home] for home in {*found.new_paths.values()}}, header), new


class _Names:
    """From the names in files to those in ``model``: None for what its class does not have.

    Attributes:
        known: the names of the tensors of ``model``; ``computed``: those that no ``state_dict`` has.
        homes: for every name that the files have a tensor for, the name that stands for the tensor here.
        raw: the name in the files of each of these.
    """

    def __init__(self, model: Any, files: FileSet) -> None:
        self._model, self._files = model, files
        self._prefix = f"{model.base_model_prefix}."
        state = set(model.state_dict())
        self.computed = {name for name, _ in model.named_buffers(remove_duplicate=False)} - state
        self.model_names = state | self.computed
        self.new_paths: dict[str, str] = {}
        self.raw: dict[str, str] = {}
        new_paths: dict[str, str] = {}
        for old in (*files.specs, *files.header.aliases):
            name, raw = self.tensor(old), files.header.aliases.get(old, old)
            if name is not None:
                self.new_paths[name] = new_paths.setdefault(raw, name)
                self.raw.setdefault(new_paths[raw], raw)

    def _map(self, name: str, exists: Callable[[str], bool]) -> str | None:
        tried = [name.removeprefix(self._prefix)] if name.startswith(self._prefix) else []
        return next((found for found in (*tried, self._prefix + name, name) if exists(found)), None)

    def module(self, path: str, entry: Entry) -> str | None:
        """Of a quantized layer or parameter."""
        weight = entry.names(path)["packed"]
        found = self._map(weight, self.model_names.__contains__)
        return None if found is None else found.removesuffix(weight.removeprefix(path)) if weight != path else found

    def inserted(self, path: str) -> str | None:
        """Of a module that a rewrite put into the model: it stands where its parent is."""
        parent, _, leaf = path.rpartition(".")
        while parent in self._files.header.inserted:
            parent, _, more = parent.rpartition(".")
            leaf = f"{more}.{leaf}"
        found = parent if not parent else self._map(parent, lambda name: name in dict(self._model.named_modules()))
        return None if found is None else join_name(found, leaf)

    def tensor(self, name: str) -> str | None:
        """Of a tensor: a part of what is quantized or inserted goes where that goes."""
        header = self._files.header
        parts = name.split(".")
        for i in range(len(parts), -1, -1):
            path, remainder = ".".join(parts[:i]), ".".join(parts[i:])
            entry = header.quantized.get(path)
            if entry is not None or path in header.inserted:
                found = self.inserted(path) if entry is None else self.module(path, entry)
                return None if found is None else join_name(found, remainder) if remainder else found
        return self._map(name, self.model_names.__contains__)


def _tie(model: Any, header: Header, new_paths: dict[str, str]) -> None:
    """Let what ``model`` ties to a tensor of the files share it, where the files have none of its own for it."""
    for name, stored in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in new_paths or stored not in new_paths:
            continue
        path, source = name.rpartition(".")[0], stored.rpartition(".")[0]
        entry = header.quantized.get(source)
        if entry is None:
            header.aliases[name] = new_paths[stored]
            continue
        module = model.get_submodule(path)
        if getattr(module, "bias", None) is not None:
            raise CheckpointError(
                f"{name} is tied to {stored}, which is quantized in the file, and has a bias that the file lacks: load the "
                f"folder as {header.model.get('class')}"
            )
        kind = "embedding" if isinstance(module, torch.nn.Embedding) else "linear"
        header.quantized[path] = replace(entry, kind=kind, bias=False, activation=None, input_scale=False)
        for part, name_here in header.quantized[path].names(path).items():
            header.aliases[name_here] = new_paths[entry.names(source)[part]]


def _is_quantized(name: str, header: Header) -> bool:
    path, _, leaf = name.rpartition(".")
    entry = header.quantized.get(path)
    return entry is not None and (leaf == "weight" or (leaf == "bias" and entry.bias))
