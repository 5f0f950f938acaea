"""The files of one checkpoint in a folder, read as one set and written as one."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from .header import Header
from .staging import WEIGHTS, replacing
from .tensor_file import CheckpointError, Spec, Stored, TensorFile, named_errors, parse_json, sync, write_tensor_file

__all__ = ["INDEX", "SINGLE", "FileSet", "open_files", "present_specs", "read_index", "weight_files", "write_files"]

SINGLE, INDEX = WEIGHTS.single, WEIGHTS.index
_MAX_INDEX = 100_000_000  # as for the header of a file


# ---- reading ---------------------------------------------------------------------------------------------------


class FileSet:
    """Open files that hold one checkpoint: ``header``, ``specs`` of all tensors by name, and :meth:`read`.

    Names and shapes are those of the present version of the format, whatever the version of the files.
    """

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self.files = files
        self.header = Header.parse(files[0].metadata, str(files[0].path))
        self._home: dict[str, TensorFile] = {}
        self._names: dict[str, str] = {}
        self._older = self.header.older_names()
        for file in files:
            if file.metadata != files[0].metadata:
                raise CheckpointError(f"{file.path}: its header differs from that of {files[0].path.name}: files of two saves")
            for name in present_specs(file, self.header):
                if name in self._home:
                    raise CheckpointError(f"{file.path}: tensor {name} stands in {self._home[name].path.name} as well")
                self._home[name] = file
        self.specs = {name: spec for file in files for name, spec in present_specs(file, self.header).items()}
        for name, stored in self.header.aliases.items():
            if name in self._home or stored not in self._home:
                raise CheckpointError(f"{files[0].path}: {name} is to share the tensor {stored}, which no file holds")
        for name in self.header.nonpersistent:
            if self.header.aliases.get(name, name) not in self._home:
                raise CheckpointError(f"{files[0].path}: the header lists the buffer {name}, which no file holds: altered")

    def path(self, name: str) -> Path:
        """The file that holds the tensor ``name``; for a name that none holds the first file."""
        return self._home.get(name, self.files[0]).path

    def read(self, name: str) -> Tensor:
        stored = self._names.get(name, name)
        older = self._older.get(stored)
        return self._home[name].read(stored) if older is None else self._home[name].read(older).unsqueeze(-1)

    def renamed(self, names: Mapping[str, str], header: Header) -> FileSet:
        """The same files, of which the tensors ``names`` (other names, to those here) count, as ``header`` has them."""
        renamed = copy.copy(self)
        renamed.header, renamed._names = header, {name: self._names.get(old, old) for name, old in names.items()}
        renamed._home = {name: self._home[old] for name, old in names.items()}
        renamed.specs = {name: self.specs[old] for name, old in names.items()}
        return renamed


def present_specs(file: TensorFile, header: Header) -> dict[str, Spec]:
    """What ``file`` holds, as the present version of the format would have it. Raises :class:`CheckpointError` for a tensor that
    an older version could not have beside the codes of a weight."""
    specs = dict(file.specs)
    for name, older in header.older_names().items():
        if name in specs:
            raise CheckpointError(f"{file.path}: unexpected: {name}, whose codes are in {older}")
        if older in specs:
            dtype, shape = specs.pop(older)
            specs[name] = Spec(dtype, (*shape, 1))
    return specs


@contextlib.contextmanager
def open_files(folder: Path) -> Iterator[FileSet]:
    """The checkpoint in ``folder``; its files stay open, so that a save at the same time does not mix two sets."""
    with contextlib.ExitStack() as stack:
        files: list[TensorFile] = []
        for name, listed in weight_files(folder, "the folder that lowbit.save wrote").items():
            file = TensorFile(folder / name)
            files.append(file)
            stack.callback(file.close)
            if odd := sorted(listed ^ file.specs.keys()) if listed else []:
                where = (
                    "is in the file and not in the index" if odd[0] in file.specs else "is listed in the index, not in the file"
                )
                raise CheckpointError(f"{file.path}: tensor {odd[0]} {where} {INDEX}")
        yield FileSet(files)


def weight_files(folder: Path, wanted: str) -> dict[str, set[str]]:
    """The files in ``folder`` that count, by name, and the tensors that an index lists for each (none without one).

    Where both are there, ``model.safetensors`` counts and not the index, as in transformers. Raises
    :class:`CheckpointError`, which tells to give ``wanted``, for a folder that holds neither.
    """
    if (folder / SINGLE).exists():
        return {SINGLE: set()}
    if (folder / INDEX).is_file():
        files: dict[str, set[str]] = {}
        for tensor, name in read_index(folder / INDEX).items():
            files.setdefault(name, set()).add(tensor)
        return dict(sorted(files.items()))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is no folder: give {wanted}")
    raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}: give {wanted}")


def read_index(path: Path, suffix: str = "safetensors") -> dict[str, str]:
    """Which file each tensor is in. Raises :class:`CheckpointError` for names that are no plain ones of such files."""
    try:
        if path.stat().st_size > _MAX_INDEX:
            raise CheckpointError(f"{path}: is larger than any index ({_MAX_INDEX} bytes)")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    places = parse_json(text, f"{path}: the index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: needs a weight_map of tensors to files")
    for name, file_name in places.items():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(file_name, str) or not re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9_.-]*\.{suffix}", file_name):
            raise CheckpointError(
                f"{path}: tensor {name}: the file must be a plain *.{suffix} name in this folder, got {file_name!r:.80}"
            )
    return places


# ---- writing ---------------------------------------------------------------------------------------------------


def write_files(
    folder: Path, tensors: Sequence[Stored], header: Header, limit: int, extras: Callable[[Path], None] | None = None
) -> None:
    """Replace the checkpoint in ``folder``. ``extras(staging)`` writes further files (config.json) into a folder.

    ``limit``: bytes of tensors in a file; a larger tensor has a file of its own. Raises ``OSError`` that names the file
    which could not be written, and leaves what was there.
    """
    groups = _split(tensors, limit)
    names = [SINGLE] if len(groups) == 1 else WEIGHTS.shards(len(groups))
    with replacing(folder) as staging:
        if extras is not None:
            with named_errors(staging):
                extras(staging)
        metadata = header.metadata()
        for name, group in zip(names, groups, strict=True):
            write_tensor_file(staging / name, group, metadata)
        if len(groups) > 1:
            _write_index(staging / INDEX, names, groups)


def _split(tensors: Sequence[Stored], limit: int) -> list[list[Stored]]:
    groups: list[list[Stored]] = [[]]
    size = 0
    for stored in tensors:
        if groups[-1] and size + stored.spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(stored)
        size += stored.spec.nbytes
    return groups


def _write_index(path: Path, names: Sequence[str], groups: Sequence[Sequence[Stored]]) -> None:
    places = {stored.name: name for name, group in zip(names, groups, strict=True) for stored in group}
    total = sum(stored.spec.nbytes for group in groups for stored in group)
    with named_errors(path), open(path, "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": places}, file, indent=1)
        sync(file)
