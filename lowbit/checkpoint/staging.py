"""Files of a folder replaced as one set: written and synced in a hidden folder beside the old ones, then renamed.

A reader takes ``model.safetensors`` where it is there, and else what the index names: transformers' rule, and this library's.
So a single rename (of the one file, or of the index) or removal (of an old ``model.safetensors``) is the moment at which the
new set counts, for every reader at once; whatever interrupts a save, one of the two sets is whole. Old files and what
earlier interrupted saves left are removed at the very end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .tensor_file import named_errors, sync

__all__ = ["WEIGHTS", "Weights", "replacing"]


@dataclass(frozen=True)
class Weights:
    """How the files of one set of weights are called."""

    single: str
    index: str
    stem: str

    @staticmethod
    def of(variant: str | None, name: str = "model") -> Weights:
        """The names of a ``variant``, as transformers' ``variant=`` puts it into them; ``name``: how the files begin."""
        tail = "" if variant is None else f".{variant}"
        return Weights(f"{name}{tail}.safetensors", f"{name}.safetensors.index{tail}.json", f"{name}{tail}")

    def shards(self, count: int) -> list[str]:
        return [f"{self.stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def is_shard(self, name: str) -> bool:
        return re.fullmatch(re.escape(self.stem) + r"(-\d+)?-\d{5}-of-\d{5}(-\d+)?\.safetensors", name) is not None


WEIGHTS = Weights.of(None)


@contextlib.contextmanager
def replacing(folder: Path, weights: Weights = WEIGHTS) -> Iterator[Path]:
    """An empty folder to write files into, a set of ``weights`` among them or none; at the end of the block they take the
    place of those in ``folder``. A block that raises changes nothing.

    Raises ``OSError`` that names the file which could not be written.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=_prefix(), dir=folder))
    try:
        yield staging
        for path in staging.rglob("*"):
            if path.is_file():
                with named_errors(path), open(path, "rb+") as file:
                    sync(file)
        current_names = _publish(folder, staging, weights)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it holds files, unless nothing could be written
                folder.rmdir()
    _clean(folder, weights, current_names)


def _prefix() -> str:
    """Of the hidden folder; processes of one job that save at once leave each other's alone."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return f".saving-{torch.distributed.get_rank() if distributed else 0}-"


def _publish(folder: Path, staging: Path, weights: Weights) -> set[str]:
    """Move everything to its place; the names of the files that hold weights."""
    shards = _avoid_existing_names(folder, staging, weights)
    files = {*shards} if shards else {weights.single} & {path.name for path in staging.iterdir()}
    others = sorted(path.name for path in staging.iterdir() if path.name not in {*files, weights.index})
    for name in shards:  # under names that nothing refers to yet
        os.replace(staging / name, folder / name)
    if shards:
        _sync_folder(folder)
    for name in others:
        if (staging / name).is_dir():  # a rename replaces files, and folders only where they are empty
            shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(staging / name, folder / name)
    if shards:
        os.replace(staging / weights.index, folder / weights.index)
        _sync_folder(folder)
        (folder / weights.single).unlink(missing_ok=True)  # until here it counts, where it is there
    elif files:
        os.replace(staging / weights.single, folder / weights.single)
        _sync_folder(folder)
        (folder / weights.index).unlink(missing_ok=True)
    _sync_folder(folder)
    return files


def _avoid_existing_names(folder: Path, staging: Path, weights: Weights) -> list[str]:
    """The shards in ``staging``; with a number in their names where an older set has these, whose files must stay until
    the index names the new ones."""
    index = staging / weights.index
    if not index.exists():
        return []
    content = json.loads(index.read_text(encoding="utf-8"))
    places: dict[str, str] = content["weight_map"]
    names = sorted(set(places.values()))
    number, free = 1, {name: name for name in names}
    while any((folder / name).exists() for name in free.values()):
        number += 1
        free = {name: f"{weights.stem}-{number}{name.removeprefix(weights.stem)}" for name in names}
    if number > 1:
        for name, other in free.items():
            os.replace(staging / name, staging / other)
        content["weight_map"] = {tensor: free[name] for tensor, name in places.items()}
        with named_errors(index), open(index, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            sync(file)
    return sorted(free.values())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _clean(folder: Path, weights: Weights, current_names: set[str]) -> None:
    """Remove older sets, where a new one came, and what interrupted saves left; a file that cannot be removed does no harm."""
    for path in folder.iterdir():
        if current_names and weights.is_shard(path.name) and path.name not in current_names:
            with contextlib.suppress(OSError):
                path.unlink()
        elif path.name.startswith(_prefix()):
            shutil.rmtree(path, ignore_errors=True)
