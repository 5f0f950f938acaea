"""Fixtures that files of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import exam_and_text, word_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exam_and_text(word_model(tmp_path_factory.mktemp("whole")))
