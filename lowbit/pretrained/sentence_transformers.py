"""sentence-transformers: the weights of its own modules, a dense layer above the encoder say, which it writes as plain tensors.

The encoder itself is a model of transformers, which saves and loads itself.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..checkpoint import load, save
from ..checkpoint.header import is_quantized
from ..checkpoint.tensor_file import TensorFile
from ..quantized_module import QuantizedModule

__all__ = ["wrap_modules"]


def wrap_modules(kind: Any) -> None:
    """Let modules of ``kind``, the base class of sentence-transformers', write and read quantized layers."""
    write, read = kind.save_torch_weights, kind.load_torch_weights.__func__
    if hasattr(write, "__lowbit__"):
        return

    @functools.wraps(write)
    def save_torch_weights(self: Any, output_path: str, safe_serialization: bool = True) -> None:
        if safe_serialization and any(isinstance(module, QuantizedModule) for module in self.modules()):
            save(self, output_path)
        else:
            write(self, output_path, safe_serialization)

    @functools.wraps(read)
    def load_torch_weights(cls: Any, model_name_or_path: str, *args: Any, model: Any = None, **options: Any) -> Any:
        where = dict(zip(_PLACES, args, strict=False)) | options
        path = cls.load_file_path(model_name_or_path, filename="model.safetensors", **where)
        if path is None or not _is_quantized(Path(path)):
            return read(cls, model_name_or_path, *args, model=model, **options)
        if model is None:
            raise ValueError(f"{path} holds quantized weights, which a {cls.__name__} reads as plain tensors: leave it float")
        training = model.training
        return load(Path(path).parent, model).train(training)

    save_torch_weights.__lowbit__ = True  # type: ignore[attr-defined]
    kind.save_torch_weights, kind.load_torch_weights = save_torch_weights, classmethod(load_torch_weights)  # type: ignore[arg-type]


_PLACES = ("subfolder", "token", "cache_folder", "revision", "local_files_only")


def _is_quantized(path: Path) -> bool:
    file = TensorFile(path)
    file.close()
    return is_quantized(file.metadata, path)
