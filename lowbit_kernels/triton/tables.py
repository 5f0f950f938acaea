"""Measured block sizes: tables shipped for a GPU, and the table that ``lowbit tune`` keeps for this machine.

A table of this machine is valid for one device, one version of torch and of Triton, and the sources of the kernels: its name
contains a hash of all of them, and the file repeats them, so that copied or truncated files are detected.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["KERNELS", "SHIPPED", "described", "file_of", "is_block", "measured", "merge", "read", "shipped_file"]

SHIPPED = Path(__file__).parent / "measured"
_VERSION = 1

Blocks = dict[str, dict[str, int]]
KERNELS = ("gemv", "gemm", "w8a8_gemm")
_FIELDS = {
    "gemv": ({"ROWS", "WORDS", "num_warps"}, {"ROWS", "QUADS", "num_warps"}),
    "gemm": (
        {"BLOCK_M", "BLOCK_N", "WORDS", "num_warps", "STAGES", "SPLIT_K"},
        {"BLOCK_M", "BLOCK_N", "WORDS", "num_warps", "STAGES", "SPLIT_K", "REGISTERS"},  # upper bounds for a thread
    ),
    "w8a8_gemm": ({"BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "STAGES"},),
}
_MAX = {"num_warps": 16, "STAGES": 8, "SPLIT_K": 64}


def described(device: torch.device) -> dict[str, Any]:
    """What a table is valid for: device, versions of the compilers, sources of the kernels."""
    name, arch = "cpu", 0
    if device.type == "cuda":
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    elif device.type != "cpu":
        name = str(getattr(torch, device.type).get_device_name(device))
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "version": _VERSION, "device": name, "arch": arch, "torch": str(torch.__version__), "triton": triton, "sources": sources()
    }  # fmt: skip


@lru_cache(maxsize=1)
def sources() -> str:
    """A hash of the kernels' sources."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def folder() -> Path:
    """``$XDG_CACHE_HOME/lowbit``, or ``~/.cache/lowbit`` where that names no absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lowbit"


def file_of(holds_for: Mapping[str, Any]) -> Path:
    """The file of this machine's measurements."""
    short = hashlib.sha256(json.dumps(holds_for, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"blocks-{_plain(holds_for['device'])}-{short}.json"


def shipped_file(device: str) -> Path:
    """The file of the GPU that torch calls ``device``, of any version, among the package's own."""
    return SHIPPED / f"{_plain(device)}.json"


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", str(name).lower()).strip("_")


@lru_cache(maxsize=16)
def measured(device: torch.device) -> Blocks:
    """The blocks for ``device``: the shipped ones, overridden by those measured here."""
    holds_for = described(device)
    shipped, own = shipped_file(holds_for["device"]), file_of(holds_for)
    return read(shipped, {"version": _VERSION, "device": holds_for["device"]}) | read(own, holds_for)


def read(path: Path, holds_for: Mapping[str, Any]) -> Blocks:
    """The blocks in a file; none where there is no file. A damaged or foreign file is ignored with one warning."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        return _ignored(path, error.strerror or str(error))
    try:
        data = json.loads(text)
    except ValueError:
        return _ignored(path, "is no JSON")
    if not isinstance(data, dict) or not isinstance(found := data.get("blocks"), dict):
        return _ignored(path, "holds no blocks")
    for name, value in holds_for.items():
        if data.get(name) != value:
            return _ignored(path, f"is for {name} {data.get(name)!r}, and this is {value!r}")
    wrong = next((name for name, block in found.items() if not is_block(name.split(" ")[0], block)), None)
    if wrong is not None:
        return _ignored(path, f"holds {found[wrong]!r} for {wrong!r}, which no kernel takes")
    return found


def is_block(kernel: str, found: object) -> bool:
    """Whether ``found`` is a block that ``kernel`` can take: anything may stand in a file."""
    if kernel not in _FIELDS or not isinstance(found, Mapping) or set(found) not in _FIELDS[kernel]:
        return False
    for name, size in found.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MAX.get(name, 2048):
            return False
        if name not in ("STAGES", "SPLIT_K") and size & (size - 1):
            return False
    return kernel == "gemv" or all(found[name] >= 8 for name in found if name.startswith("BLOCK") or name == "WORDS")


def _ignored(path: Path, why: str) -> Blocks:
    warnings.warn(f"{path} {why}: it is ignored. Delete it, or let lowbit tune MODEL write it anew", UserWarning, stacklevel=2)
    return {}


def merge(path: Path, holds_for: Mapping[str, Any], found: Mapping[str, Mapping[str, int]]) -> None:
    """Adds ``found`` to the file: written beside it and renamed, so that nobody reads half of one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unreadable file is replaced
        before = read(path, holds_for)
    text = json.dumps({**holds_for, "blocks": {**before, **{name: dict(block) for name, block in found.items()}}}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
