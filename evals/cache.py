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

from .results import named_errors, replace_file

__all__ = ["Answers", "Cache", "digest", "fingerprint"]


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
        """``lm``, a model of lm-eval, that remembers: what is in the store is not asked again, new answers go there at once."""
        if self.folder is None:
            yield lm
            return
        from lm_eval.api.model import CachingLM

        remembering = CachingLM.__new__(CachingLM)  # which would open a database, whose thread waits for ever on a full disk
        with Answers(self.folder / f"answers-{digest(of)}.jsonl") as store:
            remembering.lm, remembering.cache_db, remembering.dbdict = lm, str(store.path), store
            lm.set_cache_hook(remembering.get_cache_hook())
            yield remembering


class Answers:
    """What lm-eval asks of its store: answers by the hashes of questions, a line each in a file that only grows.

    A program that is killed has lost none but that which it was writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        with named_errors(path):
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed by __exit__
            self._file.seek(0)
            text = self._file.read()
            for line in text.splitlines():
                with contextlib.suppress(ValueError, TypeError):  # cut short by whatever ended the program
                    key, answer = json.loads(line)
                    self._known[key] = tuple(answer) if isinstance(answer, list) else answer
            if text and not text.endswith(b"\n"):
                self._write(b"\n")

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def __setitem__(self, key: str, answer: Any) -> None:
        if key not in self._known:  # lm-eval gives each twice: as it comes, and at the end
            self._known[key] = answer
            self._write(json.dumps([key, answer]).encode() + b"\n")

    def commit(self) -> None:
        """Nothing waits to be written."""

    def _write(self, line: bytes) -> None:
        with named_errors(self.path):
            while line:
                line = line[self._file.write(line) :]


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
