"""``save_pretrained`` of a quantized model: transformers' own, into a hidden folder whose files then replace the older set.

transformers writes over the files that are there, one after the other, and leaves some of an earlier save that had more or
fewer shards: a ``model.safetensors`` that readers prefer to the index just written, or an index of shards that are gone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.card import write_card
from ..checkpoint.staging import Weights, replacing

__all__ = ["save_pretrained"]


def save_pretrained(
    save: Callable[..., Any],
    model: Any,
    save_directory: str | os.PathLike[str],
    *args: Any,
    files: str = "model",
    **options: Any,
) -> Any:
    """``save(model, save_directory, ...)`` as one set of ``files``. Where it raises, the folder is as it was."""
    folder = Path(save_directory)
    found = inspect.signature(save).bind(model, folder, *args, **options).arguments
    given = {**found, **found.get("kwargs", {})}
    if folder.is_file() or given.get("distributed_checkpoint") or not given.get("is_main_process", True):
        return save(model, str(folder), *args, **options)  # nothing is written, or by every process at once
    if given.get("push_to_hub"):
        options.setdefault("repo_id", folder.absolute().name)  # transformers would take the name of the hidden folder
    with replacing(folder, Weights.of(given.get("variant"), files)) as staging:
        saved = save(model, str(staging), *args, **options)
        if files == "model":
            write_card(staging, folder)
        return saved
