"""What setup.py built: the shared libraries beside this file, loaded when a kernel first asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["CPU", "CUDA", "Library"]


@dataclass(frozen=True)
class Library:
    """A shared library of operators. ``what`` names it in messages, ``remedy`` says how to get it."""

    file: Path
    what: str
    remedy: str

    def missing(self) -> str | None:
        """Loads the library, once; why that is impossible, in words, or None."""
        return _load(self)


@lru_cache(maxsize=16)
def _load(library: Library) -> str | None:
    if not library.file.exists():
        return f"{library.what} is not built: {library.remedy}"
    try:
        torch.ops.load_library(str(library.file))
    except (OSError, RuntimeError) as error:
        return f"{library.what} cannot be loaded ({error}): {library.remedy}"
    return None


_FOLDER = Path(__file__).parent
CPU = Library(
    _FOLDER / "_C.so",
    "the C++ library",
    "install a C++ compiler (g++ or clang++) beside torch, and then lowbit again (pip install --force-reinstall --no-deps .)",
)
CUDA = Library(
    _FOLDER / "_C_cuda.so",
    "the CUDA library",
    "install the CUDA toolkit (nvcc) and install lowbit again (LOWBIT_CUDA=1 pip install --force-reinstall --no-deps .)",
)
