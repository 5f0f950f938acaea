"""What accelerate does with weights by their dtype and number of values, done by what a quantized weight is.

Its functions are wrapped, once accelerate is imported, and are what they were for every other tensor: none of them asks it.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .disk import is_quantized, replace_everywhere, wrap_offloading

__all__ = ["wrap_accelerate", "wrap_checkpointing", "wrap_dispatching"]


def wrap_accelerate(modeling: ModuleType) -> None:
    """Wrap what ``modeling``, which is ``accelerate.utils.modeling``, and its neighbours have for the weights of a model."""
    offload = sys.modules["accelerate.utils.offload"]
    if hasattr(modeling.compute_module_sizes, "__lowbit__"):
        return
    replace_everywhere(modeling.compute_module_sizes, _with_true_sizes(modeling.compute_module_sizes, modeling.CustomDtype.FP8))
    wrap_offloading(offload)
    replace_everywhere(modeling.load_checkpoint_in_model, _of_folders(modeling.load_checkpoint_in_model))


def wrap_dispatching(dispatching: ModuleType) -> None:
    """Let ``load_checkpoint_and_dispatch`` of ``accelerate.big_modeling`` make device maps from what a quantized folder holds."""
    original = dispatching.load_checkpoint_and_dispatch
    if hasattr(original, "__lowbit__"):
        return

    @functools.wraps(original)
    def load_checkpoint_and_dispatch(*args: Any, **options: Any) -> Any:
        from .loading import outline, quantized_folder

        given = inspect.signature(original).bind(*args, **options).arguments
        if (folder := quantized_folder(given["checkpoint"])) is not None:
            outline(given["model"], folder)
        return original(*args, **options)

    replace_everywhere(original, load_checkpoint_and_dispatch)
    for name in ("disk_offload", "dispatch_model"):
        replace_everywhere(getattr(dispatching, name), _with_empty_offload_dir(getattr(dispatching, name)))


def _with_empty_offload_dir(place: Callable[..., Any]) -> Callable[..., Any]:
    """``place(model, ..., offload_dir=)``, which takes what lies in the folder for the weights of ``model`` and writes none."""

    @functools.wraps(place)
    def with_empty_offload_dir(*args: Any, **options: Any) -> Any:
        given = inspect.signature(place).bind(*args, **options).arguments
        folder = given.get("offload_dir")
        if folder is not None and given.get("offload_index") is None:
            _check_index(given["model"], Path(folder) / "index.json")
        return place(*args, **options)

    return with_empty_offload_dir


def _check_index(model: Any, path: Path) -> None:
    """Raises ``ValueError`` where the folder has the weights of ``model`` otherwise quantized, or not."""
    if not path.is_file():
        return
    index = json.loads(path.read_text(encoding="utf-8"))
    for name, parameter in model.named_parameters():
        entry = index.get(name)
        if entry is not None and not parameter.is_meta and entry.get("scheme") != getattr(parameter, "scheme_str", None):
            stored_scheme, current_scheme = entry.get("scheme", "floats"), getattr(parameter, "scheme_str", "floats")
            raise ValueError(
                f"{path.parent} holds {name} of an earlier model as {stored_scheme}, and here it is {current_scheme}: give an "
                f"empty folder"
            )


def wrap_checkpointing(checkpointing: ModuleType) -> None:
    """Let ``Accelerator.save_state`` and ``load_state``, by ``accelerate.checkpointing``, write and read quantized weights."""
    write, read = (getattr(checkpointing, name, None) for name in ("save", "load_model"))
    if write is None or read is None or hasattr(write, "__lowbit__"):
        return

    @functools.wraps(write)
    def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> Any:
        if safe_serialization and isinstance(obj, dict) and any(is_quantized(value) for value in obj.values()):
            from .states import in_parts

            obj = in_parts(obj)
        return write(obj, f, save_on_each_node, safe_serialization)

    @functools.wraps(read)
    def load_model(model: Any, filename: Any, strict: bool = True, device: Any = "cpu") -> Any:
        if not _weights(model):
            return read(model, filename, strict=strict, device=device)
        from .states import load_parts

        return load_parts(model, filename, strict, device)

    save.__lowbit__ = True  # type: ignore[attr-defined]
    checkpointing.save, checkpointing.load_model = save, load_model  # type: ignore[attr-defined]


def _with_true_sizes(compute: Callable[..., Any], byte: Any) -> Callable[..., Any]:
    """``compute_module_sizes``, which counts values. ``byte``: what it takes for a dtype of one byte."""

    @functools.wraps(compute)
    def compute_module_sizes(
        model: Any, dtype: Any = None, special_dtypes: Any = None, buffers_only: bool = False, **options: Any
    ) -> Any:
        given = special_dtypes or {}
        found = {} if buffers_only else {name: p for name, p in _weights(model) if name not in given}
        if not found:
            return compute(model, dtype, special_dtypes, buffers_only, **options)
        sizes = compute(model, dtype, {**given, **dict.fromkeys(found, byte)}, buffers_only, **options)
        for name, weight in found.items():
            parts = name.split(".")
            for i in range(len(parts) + 1):
                sizes[".".join(parts[:i])] += weight.nbytes - weight.numel()
        return sizes

    return compute_module_sizes


def _of_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    """``load_checkpoint_in_model``, for quantized folders too."""

    @functools.wraps(load)
    def load_checkpoint_in_model(*args: Any, **options: Any) -> Any:
        from .loading import load_in_model, quantized_folder

        given = inspect.signature(load).bind(*args, **options)
        if (folder := quantized_folder(given.arguments["checkpoint"])) is None:
            return load(*args, **options)
        given.apply_defaults()
        load_in_model(folder, **{name: given.arguments[name] for name in _OF_FOLDERS})
        return None

    return load_checkpoint_in_model


_OF_FOLDERS = ("model", "device_map", "offload_folder", "dtype", "offload_buffers")


def _weights(model: Any) -> list[tuple[str, Any]]:
    """The quantized parameters of ``model``."""
    return [(name, parameter) for name, parameter in model.named_parameters() if is_quantized(parameter)]
