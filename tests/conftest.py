"""What every test file shares."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which no test file does before this

hypothesis.settings.register_profile("lowbit", deadline=None)  # how long an example takes depends on who else is at work
hypothesis.settings.load_profile("lowbit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("works_with"):
            item.user_properties.append(("works_with", " / ".join(mark.args)))
    if torch.cuda.is_available():
        return
    absent = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(absent)
