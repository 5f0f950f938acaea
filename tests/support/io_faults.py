"""Disks without room and readers that leave, within a test's own process."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Within the block no file grows beyond ``size`` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def unread() -> Iterator[TextIO]:
    """A pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        yield stream
