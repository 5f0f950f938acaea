"""From a folder with a float model to one with a quantized model."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.calibrator import Calibrator
from ..calibration.data import Batch, Calibration, CalibrationLike, amount
from ..calibration.data_checks import data_notes
from ..calibration.pytree import tree_leaves
from ..calibration.ranks import Ranks
from ..checkpoint.card import write_card
from ..checkpoint.hf_config import build_on_meta, write_config
from ..checkpoint.inventory import Inventory
from ..checkpoint.shards import write_files
from ..environment import usable_device
from ..planning import planned
from ..plans import Plan
from ..quantize import blockwise
from ..recipe import Recipe, RecipeLike
from ..replacement import Progress, Replacement
from ..torch_state import isolated
from .budget import statistics_budget
from .disk_offload import DiskOffload
from .malloc_trim import mmap_large_tensors
from .source import Source, identity, open_source, opened, untie
from .workspace import DiskActivationStore, Workspace

__all__ = ["quantize_folder"]

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip


@isolated()
@mmap_large_tensors()
def quantize_folder(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    recipe: RecipeLike,
    *,
    calibration: CalibrationLike,
    max_memory: int | str | None = None,
    resume: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    max_shard_bytes: int = 4_000_000_000,
) -> Plan:
    """Quantize the transformers model in the folder ``source`` and write it to ``output``, one block in memory at a time.

    What :func:`lowbit.quantize_` and :func:`lowbit.save` would write for the loaded model is written, byte for byte.

    Args:
        source: a folder with ``config.json`` and safetensors files. Tensors under names other than the model's (experts one
            by one) are written anew first, in the memory that transformers takes to load them one at a time.
        output: where the model, its configuration and its tokenizer go, as :func:`lowbit.save` does it.
        recipe: as that of :func:`lowbit.quantize_`; so are ``calibration``, ``device`` and ``progress``.
        max_memory: bytes, or a text such as ``"8GB"``, that the work may take beside the interpreter.
        resume: a folder for what is finished. A job that was killed, called again with the same arguments, goes on from there
            and ends in the same bytes; the folder is removed at the end. By default one beside ``output``, which is removed
            in any case.
        max_shard_bytes: of one file of ``output``; larger models are written as several with an index.

    Processes of one ``torch.distributed`` group, on a file system that they share, split the batches and the layers between
    them; the first writes.

    Memory holds the largest block with its statistics, what the rounder takes for one of its layers and one batch; what
    stands outside of blocks is there only while a batch comes in or, where the recipe names it, is quantized. Where that is
    more than ``max_memory``, batches run through a block several times, for some of its Gram matrices each (in one process
    and without rewrites). Raises ``ValueError`` where not even one fits beside the rest, before any work; for what
    :func:`lowbit.quantize_` refuses; for a model that is quantized already; and for a ``resume`` folder of another job. Raises
    :class:`~lowbit.CheckpointError` for files that cannot be read, and with the names for tensors that they lack, that are not
    the model's, or that have another shape.
    """
    from ..pretrained.float_folder import check_float, check_folder

    folder, recipe = Path(source), Recipe.of(recipe)
    if Path(output).exists() and folder.exists() and Path(output).samefile(folder):
        raise ValueError(f"output {output} is the model itself: give another folder")
    model_rewrite = next((rewrite.name for rewrite in recipe.rewrites if rewrite.method.kind == "model"), None)
    if model_rewrite is not None:
        raise ValueError(f"{model_rewrite} rewrites the whole model, which is never in memory here: load it, then call quantize_")
    where = None if device is None else usable_device(device)
    check_float(folder)
    model: Any = build_on_meta(folder, real_buffers=True)
    findings = check_folder(folder, model)
    with opened(folder) as found:
        untie(model, found)
    model.name_or_path = str(folder)  # where its tokenizer is
    plan, layers = planned(model, recipe, None, where or torch.device("cpu"), has_data=True)
    data = Calibration.of(calibration)
    batches = data.batches(model)
    remarked = data_notes(data, batches, recipe, plan.layers)
    plan = dataclasses.replace(plan, calibration=amount(batches))
    rewrites = blockwise(recipe)
    statistics_bytes = statistics_budget(max_memory, layers, plan, batches, at_once=bool(rewrites) or Ranks().count > 1)
    with opened(folder) as found:
        job = {"model": identity(found), "recipe": recipe.to_dict(), "data": _digest(batches), "device": str(where)}
        with (
            _workspace(resume, Path(output), job) as workspace,
            open_source(folder, model, found, workspace.folder / "weights") as files,
        ):
            files.load_buffers(model)
            offload = DiskOffload(model, files, workspace, where)
            replacement = Replacement(model, plan.layers, layers, where, False, progress, offload.trim)
            states = DiskActivationStore(workspace.folder)
            calibrator = Calibrator(model, plan.layers, layers, batches, replacement, offload, states, rewrites, statistics_bytes)
            calibrator.run()
            if Ranks().rank == 0:
                finished = Inventory(model, partial(_tensor, model, files, workspace))
                from ..pretrained.quantizer import quantization_config_of  # transformers is imported before

                quantization_config = quantization_config_of(model, finished.header, plan)
                extras = partial(_extras, model, folder, Path(output), quantization_config)
                write_files(Path(output), finished.tensors, finished.header, max_shard_bytes, extras)
    notes = (*findings, *remarked, *plan.notes, *calibrator.notes)
    return dataclasses.replace(plan, layers=tuple(replacement.entries), notes=notes)


def _tensor(model: nn.Module, files: Source, workspace: Workspace, name: str) -> Tensor:
    """The tensor ``name`` of the finished model, which is not in memory."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:i])
        if workspace.has(path):
            return workspace.tensor(path, ".".join(parts[i:]))
    return files.read(name).to(model.get_parameter(name).dtype)


def _extras(model: nn.Module, source: Path, output: Path, quantization_config: dict[str, Any], staging: Path) -> None:
    write_config(model, staging, quantization_config)
    write_card(staging, output)
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, staging / name)


def _digest(batches: Sequence[Batch]) -> str:
    """A name for the data that changes with it."""
    digest = hashlib.sha256()
    for batch in batches:
        for leaf in tree_leaves([batch.args, sorted(batch.kwargs), batch.kwargs]):
            if isinstance(leaf, Tensor):
                digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
                digest.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().data if leaf.numel() else b"")
            else:
                digest.update(repr(leaf).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _workspace(resume: str | os.PathLike[str] | None, output: Path, job: dict[str, Any]) -> Iterator[Workspace]:
    """The workspace of all processes, which the first of them makes and removes; without ``resume`` also after an error."""
    ranks = Ranks()
    error: Exception | None = None
    folder = Path()
    if ranks.rank == 0:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".quantizing-", dir=output.parent) if resume is None else resume)
        try:
            Workspace(folder).prepare(job)
        except (ValueError, OSError) as found:
            error = found
    error, folder = ranks.broadcast((error, folder))
    if error is not None:
        raise error
    workspace = Workspace(folder)
    try:
        yield workspace
        ranks.barrier()
        if ranks.rank == 0:
            workspace.remove()
    finally:
        if resume is None and ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
