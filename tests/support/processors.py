"""Marks of tests that need what not every processor has."""

from __future__ import annotations

import pytest

from lowbit_kernels import cpu

__all__ = ["needs_digits"]

_lacking = cpu._split_int8_available()
needs_digits = pytest.mark.skipif(_lacking is not None, reason=f"products by digits: {_lacking}")
"""Products by digits, which need AVX2. A library that is built and lacks them otherwise fails the tests."""
