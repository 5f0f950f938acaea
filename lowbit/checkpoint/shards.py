"""The files of one checkpoint in a folder: read as one set, and replaced as one set.

Writing: everything is written and synced in a hidden folder beside the old files, then renamed. A single rename (of the
index, or of the one file) or removal (of an old index) is the moment at which the new set counts; whatever interrupts a
save, one of the two sets is whole. Old files and what earlier interrupted saves left are removed at the very end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from .header import Header
from .tensor_file import CheckpointError, Spec, Stored, TensorFile, named_errors, parse_json, sync, write_tensor_file

__all__ = ["INDEX", "SINGLE", "FileSet", "open_files", "read_index", "write_files"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}(-\d+)?\.safetensors")
_STAGING = ".saving-"
_MAX_INDEX = 100_000_000  # as for the header of a file


# ---- reading ---------------------------------------------------------------------------------------------------


class FileSet:
    """Open files that hold one checkpoint: ``header``, ``specs`` of all tensors by name, and :meth:`read`."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self.files = files
        self.header = Header.parse(files[0].metadata, str(files[0].path))
        self._home: dict[str, TensorFile] = {}
        for file in files:
            if file.metadata != files[0].metadata:
                raise CheckpointError(f"{file.path}: its header differs from that of {files[0].path.name}: files of two saves")
            for name in file.specs:
                if name in self._home:
                    raise CheckpointError(f"{file.path}: tensor {name} stands in {self._home[name].path.name} as well")
                self._home[name] = file
        for name, stored in self.header.aliases.items():
            if name in self._home or stored not in self._home:
                raise CheckpointError(f"{files[0].path}: {name} is to share the tensor {stored}, which no file holds")
        for name in self.header.nonpersistent:
            if self.header.aliases.get(name, name) not in self._home:
                raise CheckpointError(f"{files[0].path}: the header lists the buffer {name}, which no file holds: altered")

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: file.specs[name] for name, file in self._home.items()}

    def path(self, name: str) -> Path:
        """The file that holds the tensor ``name``; for a name that none holds the first file."""
        return self._home.get(name, self.files[0]).path

    def read(self, name: str) -> Tensor:
        return self._home[name].read(name)


@contextlib.contextmanager
def open_files(folder: Path) -> Iterator[FileSet]:
    """The checkpoint in ``folder``; its files stay open, so that a save at the same time does not mix two sets."""
    index = folder / INDEX
    with contextlib.ExitStack() as stack:
        files: list[TensorFile] = []

        def opened(name: str) -> TensorFile:
            files.append(TensorFile(folder / name))
            stack.callback(files[-1].close)
            return files[-1]

        if index.is_file():
            places = read_index(index)
            for name in sorted(set(places.values())):
                file = opened(name)
                listed = {tensor for tensor, home in places.items() if home == name}
                if odd := sorted(listed ^ file.specs.keys()):
                    where = (
                        "is in the file and not in the index"
                        if odd[0] in file.specs
                        else "is listed in the index, not in the file"
                    )
                    raise CheckpointError(f"{file.path}: tensor {odd[0]} {where} {INDEX}")
        elif (folder / SINGLE).exists() or folder.is_dir():
            if not (folder / SINGLE).exists():
                raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}: give the folder that lowbit.save wrote")
            opened(SINGLE)
        else:
            raise CheckpointError(f"{folder}: is no folder: give the one that lowbit.save wrote")
        yield FileSet(files)


def read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX:
            raise CheckpointError(f"{path}: is larger than any index ({_MAX_INDEX} bytes)")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    places = parse_json(text, f"{path}: the index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: needs a weight_map of tensors to files")
    for name, home in places.items():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(home, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", home):
            raise CheckpointError(
                f"{path}: tensor {name}: the file must be a plain *.safetensors name in this folder, got {home!r:.80}"
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
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    groups = _split(tensors, limit)
    names = [SINGLE] if len(groups) == 1 else _free_names(folder, len(groups))
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
    try:
        if extras is not None:
            with named_errors(staging):
                extras(staging)
        others = sorted(path.name for path in staging.iterdir())
        for path in staging.rglob("*"):
            if path.is_file():
                with named_errors(path), open(path, "rb+") as file:
                    sync(file)
        metadata = header.metadata()
        for name, group in zip(names, groups, strict=True):
            write_tensor_file(staging / name, group, metadata)
        if len(groups) > 1:
            _write_index(staging / INDEX, names, groups)
        _publish(folder, staging, others, names)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it holds files, unless nothing could be written
                folder.rmdir()
    _clean(folder, set(names))


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


def _free_names(folder: Path, count: int) -> list[str]:
    """``model-00001-of-00003.safetensors`` and so on; with a number behind where an older set has these names, whose
    files must stay until the index names the new ones."""
    turn = 1
    while True:
        tail = "" if turn == 1 else f"-{turn}"
        names = [f"model-{i:05d}-of-{count:05d}{tail}.safetensors" for i in range(1, count + 1)]
        if not any((folder / name).exists() for name in names):
            return names
        turn += 1


def _write_index(path: Path, names: Sequence[str], groups: Sequence[Sequence[Stored]]) -> None:
    places = {stored.name: name for name, group in zip(names, groups, strict=True) for stored in group}
    total = sum(stored.spec.nbytes for group in groups for stored in group)
    with named_errors(path), open(path, "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": places}, file, indent=1)
        sync(file)


def _publish(folder: Path, staging: Path, others: Sequence[str], names: Sequence[str]) -> None:
    sharded = (staging / INDEX).exists()
    if sharded:  # under names that nothing refers to yet
        for name in names:
            os.replace(staging / name, folder / name)
        _sync_folder(folder)
    for name in others:
        if (staging / name).is_dir():  # a rename replaces files, and folders only where they are empty
            shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(staging / name, folder / name)
    if sharded:
        os.replace(staging / INDEX, folder / INDEX)
    else:
        os.replace(staging / SINGLE, folder / SINGLE)
        (folder / INDEX).unlink(missing_ok=True)  # until here an index of an older set counts
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _clean(folder: Path, keep: set[str]) -> None:
    """Remove older sets and what interrupted saves left; a file that cannot be removed does no harm."""
    for path in folder.iterdir():
        old = path.name == SINGLE or _SHARD.fullmatch(path.name)
        if old and path.name not in keep:
            with contextlib.suppress(OSError):
                path.unlink()
        elif path.name.startswith(_STAGING):
            shutil.rmtree(path, ignore_errors=True)
