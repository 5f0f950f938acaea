"""Marks of tests that need what not every processor has."""

from __future__ import annotations

import pytest

from lowbit_kernels import cpu

__all__ = ["needs_split_int8"]

_lacking = cpu._split_int8_available()
needs_split_int8 = pytest.mark.skipif(_lacking is not None, reason=f"split-int8 products: {_lacking}")
"""Split-int8 products, which need AVX2. A library that is built and lacks them otherwise fails the tests."""
