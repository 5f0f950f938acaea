"""``save_pretrained`` of a quantized model: transformers' own, into a hidden folder whose files then replace the older set.

transformers writes over the files that are there, one after the other, and leaves some of an earlier save that had more or
fewer shards: a ``model.safetensors`` that readers prefer to the index just written, or an index of shards that are gone.

The method of ``PreTrainedModel`` is wrapped, once there is a quantized model, and is what it was for all others. An attribute
of the one model would refer to the model, whose memory would then outlive the last reference to it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.staging import Weights, replacing

__all__ = ["wrap_save_pretrained"]


def wrap_save_pretrained(is_quantized: Callable[[Any], bool]) -> None:
    """Let ``save_pretrained`` of the models that ``is_quantized`` tells replace a folder's files as one set."""
    from transformers.modeling_utils import PreTrainedModel

    save = PreTrainedModel.save_pretrained
    if hasattr(save, "__lowbit__"):
        return

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        if is_quantized(self):
            return _save_as_set(functools.partial(save, self), Path(save_directory), *args, **options)
        return save(self, save_directory, *args, **options)

    save_pretrained.__lowbit__ = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]


def _save_as_set(save: Callable[..., Any], folder: Path, *args: Any, **options: Any) -> Any:
    """``save(folder, *args, **options)``. Where it raises, ``folder`` is as it was."""
    found = inspect.signature(save).bind(folder, *args, **options).arguments
    given = {**found, **found.get("kwargs", {})}
    if folder.is_file() or given.get("distributed_checkpoint") or not given.get("is_main_process", True):
        return save(str(folder), *args, **options)  # nothing is written, or by every process at once
    if given.get("push_to_hub"):
        options.setdefault("repo_id", folder.absolute().name)  # transformers would take the name of the hidden folder
    with replacing(folder, Weights.of(given.get("variant"))) as staging:
        return save(str(staging), *args, **options)
