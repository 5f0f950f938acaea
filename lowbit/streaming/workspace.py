"""The folder that a job works in: finished blocks, the inputs of the next one, and what the job is.

Every file is written under a name of its own, synced and then renamed, so that whatever is there is whole. The file of a
block is what counts: it is written when the inputs of the next block are all there, and older inputs go behind it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.activation_store import ActivationStore, BlockInputs
from ..checkpoint.assembly import Assembly
from ..checkpoint.inventory import Inventory
from ..checkpoint.shards import FileSet
from ..checkpoint.tensor_file import Spec, Stored, TensorFile, write_tensor_file
from ..plans import LayerPlan
from ..replacement import CompletedLayer
from ..rewrites.rescale_record import Rescaled

__all__ = ["DiskActivationStore", "Workspace"]

_JOB = "job.json"
_LAYERS = "layers"


class Workspace:
    """``folder``, once :meth:`prepare` has made it that of a job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, identity: Mapping[str, Any]) -> None:
        """Begin the job that ``identity`` (plain data) describes, or go on with it. Raises ``ValueError`` for a folder that
        holds another one, or other files."""
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(identity, indent=1, sort_keys=True)
        job = folder / _JOB
        if job.exists():
            self._compare(json.loads(job.read_text(encoding="utf-8")), json.loads(text))
        elif any(path for path in folder.iterdir() if not path.name.endswith(".part")):
            raise ValueError(f"{folder} holds files that are no job of lowbit's: give a new folder to resume from")
        else:
            _write_text(job, text)
        for left in list(folder.rglob("*.part")):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)
        (folder / "blocks").mkdir(exist_ok=True)

    def _compare(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        if odd := [name for name in expected if found.get(name) != expected[name]]:
            raise ValueError(
                f"{self.folder} holds a job of another {' and '.join(odd)}: give the same again, or a new folder to resume from"
            )

    # ---- blocks --------------------------------------------------------------------------------------------------

    def block(self, path: str) -> Path:
        """The file of the block ``path`` of the model."""
        return self.folder / "blocks" / f"{path or 'model'}.safetensors"

    def has(self, path: str) -> bool:
        return self.block(path).exists()

    def save_block(self, path: str, block: nn.Module, entries: Sequence[LayerPlan]) -> None:
        """Write ``block`` as it is now, and what was done to its layers."""
        found = Inventory(block)
        done = {entry.name: [entry.loss, entry.notes, [asdict(record) for record in entry.rewrites]] for entry in entries}
        metadata = {**found.header.metadata(), _LAYERS: json.dumps(done)}
        _write_tensors(self.block(path), found.tensors, metadata)

    def read(self, path: str, block: nn.Module, device: str) -> None:
        """Make ``block`` what was kept; on the device ``"meta"`` an outline of it."""
        file = TensorFile(self.block(path))
        try:
            assembly = Assembly(block, FileSet([file]), torch.device(device))
            assembly.read()
            assembly.apply()
        finally:
            file.close()

    def done(self, path: str) -> dict[str, CompletedLayer]:
        """What was done to the layers of a block that is kept, by their names in the model."""
        file = TensorFile(self.block(path))
        file.close()
        layers = json.loads(file.metadata[_LAYERS])
        return {
            name: CompletedLayer(loss, tuple(notes), tuple(Rescaled(**record) for record in rewrites))
            for name, (loss, notes, rewrites) in layers.items()
        }

    def tensor(self, path: str, name: str) -> Tensor:
        """One tensor of a block that is kept, as the file has it."""
        file = TensorFile(self.block(path))
        try:
            files = FileSet([file])
            return files.read(files.header.aliases.get(name, name))
        finally:
            file.close()

    def remove(self) -> None:
        """The job is over; what it is goes last, so that whatever interrupts this leaves a job that can go on."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (self.folder / _JOB).unlink()
        self.folder.rmdir()


class DiskActivationStore(ActivationStore):
    """The inputs of blocks in files, one a batch; those of at most two blocks at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _home(self, stack: int, block: int) -> Path:
        return self._folder / f"inputs-{stack}-{block}"

    def put(self, stack: int, block: int, batch: int, inputs: BlockInputs) -> None:
        home = self._home(stack, block)
        home.mkdir(exist_ok=True)
        tensors, plain = [], {}
        for kind, leaves in (("leaves", inputs.values), ("floats", inputs.float_values)):
            for index, leaf in ({} if leaves is None else leaves).items():
                if isinstance(leaf, Tensor):
                    spec = Spec(leaf.dtype, tuple(leaf.shape))
                    tensors.append(Stored(f"{kind}.{index}", spec, lambda leaf=leaf: leaf))  # type: ignore[misc]
                else:
                    plain[f"{kind}.{index}"] = leaf
        metadata = {"plain": json.dumps(plain), "paired": json.dumps(inputs.float_values is not None)}
        _write_tensors(home / f"{batch}.safetensors", tensors, metadata)

    def get(self, stack: int, block: int, batch: int) -> BlockInputs:
        file = TensorFile(self._home(stack, block) / f"{batch}.safetensors")
        try:
            found: dict[str, dict[int, Any]] = {"leaves": {}, "floats": {}}
            for name, leaf in (*json.loads(file.metadata["plain"]).items(), *((name, file.read(name)) for name in file.specs)):
                kind, _, index = name.partition(".")
                found[kind][int(index)] = leaf
            return BlockInputs(found["leaves"], found["floats"] if json.loads(file.metadata["paired"]) else None)
        finally:
            file.close()

    def latest(self, stack: int, block: int, batches: int) -> int:
        return max((i for i in range(1, block + 1) if len(self._batches(stack, i)) == batches), default=0)

    def _batches(self, stack: int, block: int) -> list[Path]:
        home = self._home(stack, block)
        return list(home.glob("*.safetensors")) if home.is_dir() else []

    def drop(self, stack: int, block: int) -> None:
        shutil.rmtree(self._home(stack, block), ignore_errors=True)


def _write_tensors(path: Path, tensors: Sequence[Stored], metadata: Mapping[str, str]) -> None:
    part = path.with_name(f"{path.name}.part")
    write_tensor_file(part, tensors, metadata)
    os.replace(part, path)


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
