"""Tiny models, exams and texts that files of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.models import exam_of_words, with_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exam_of_words(tmp_path_factory.mktemp("exam"))


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[nn.Module, Any]:
    return with_tokenizer(model)
