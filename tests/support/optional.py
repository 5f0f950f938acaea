"""Libraries of the dev extra that need a newer Python than lowbit does."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

__all__ = ["from_python_311"]


def from_python_311(name: str) -> ModuleType:
    """The library ``name``; the test is skipped on an older Python, and fails where the library is not installed on this one."""
    if sys.version_info < (3, 11):
        pytest.skip(f"{name} needs Python 3.11", allow_module_level=True)
    return importlib.import_module(name)
