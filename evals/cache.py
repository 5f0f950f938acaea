"""What was measured already: figures and lm-eval's answers on the disk, under a key that names all they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .results import replace_file

__all__ = ["Cache", "digest", "fingerprint"]


class Cache:
    """Keeps figures in ``folder``, so that work that was interrupted goes on; keeps nothing where that is None.

    What is asked for under another ``key`` is never answered from here: a key is any JSON that names the model, the recipe
    and the software.
    """

    def __init__(self, folder: Path | None = None, key: Any = None) -> None:
        self.folder = None if folder is None else folder / digest(key)

    def figure(self, name: str, of: Any, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives, as JSON, computed once for each ``name`` and each content of ``of``."""
        if self.folder is None:
            return compute()
        path = self.folder / f"{name}-{digest(of)}.json"
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text(encoding="utf-8"))
        found = compute()
        replace_file(path, json.dumps(found))
        return found

    @contextlib.contextmanager
    def answers(self, lm: Any, of: Any) -> Iterator[Any]:
        """``lm``, a model of lm-eval, behind lm-eval's own store of answers, which are written as they come."""
        if self.folder is None:
            yield lm
            return
        from lm_eval.api.model import CachingLM

        self.folder.mkdir(parents=True, exist_ok=True)
        remembering = CachingLM(lm, str(self.folder / f"answers-{digest(of)}.db"))
        try:
            yield remembering
        finally:
            remembering.dbdict.close()


def digest(data: Any) -> str:
    """A short name for the content of ``data``, which JSON can write."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:32]


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """A name for what ``model`` computes: every byte of its parameters and buffers, its layers, its configuration, and the
    tokenizer; the folder that it came from plays no part."""
    seen = hashlib.sha256(repr(model).encode())
    if (config := getattr(model, "config", None)) is not None:
        settings = {key: value for key, value in config.to_dict().items() if key not in ("_name_or_path", "transformers_version")}
        seen.update(json.dumps(settings, sort_keys=True, default=str).encode())
    seen.update(_words(tokenizer))
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            seen.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return seen.hexdigest()


def _words(tokenizer: Any) -> bytes:
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:
        return inner.to_str().encode()
    vocabulary: Mapping[str, int] = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return json.dumps([type(tokenizer).__name__, sorted(vocabulary.items())]).encode()


def writable(folder: Path) -> bool:
    """Whether ``folder`` takes files, or can be made."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return above.is_dir() and os.access(above, os.W_OK)
