"""What glibc's heap keeps of freed memory, which one block in memory at a time has to get back.

glibc maps a large allocation for itself and unmaps it when it is freed; but each that is freed raises the size that counts as
large, up to 32 MiB, and what is smaller then lies in the heap in pieces, between which no other tensor fits.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

__all__ = ["mmap_large_tensors", "trim"]

_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE = 1 << 20  # smaller pieces of the heap do not add up, and mapping each of those too takes as long as the work
_MAX_THRESHOLD = 32 << 20  # what counts as large in a process that has freed such a tensor


@contextlib.contextmanager
def mmap_large_tensors() -> Iterator[None]:
    """Within, a tensor of 1 MiB goes back to the system when it is freed; afterwards one of 32 MiB does, as in any process
    that has freed one. Does nothing where there is no glibc."""
    _mallopt("mallopt", _THRESHOLD, _LARGE)
    try:
        yield
    finally:
        _mallopt("mallopt", _THRESHOLD, _MAX_THRESHOLD)


def trim() -> None:
    """Give freed memory back to the system: glibc keeps it in pieces, and what comes next wants it whole."""
    _mallopt("malloc_trim", 0)


def _mallopt(function: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
            getattr(ctypes.CDLL(None), function)(*arguments)
