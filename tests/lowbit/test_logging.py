"""What quantizing says to the logger ``lowbit``: a line a layer for who wants them, and what came of it."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from lowbit import quantize_


def test_layers_and_the_result_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    with caplog.at_level(logging.DEBUG, logger="lowbit"):
        quantize_(model, "int4")
    layers = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert [line.split(":")[0] for line in layers] == ["0", "1"]
    (result,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert result.startswith("2 of 2 layers quantized")


def test_nothing_is_said_unasked(capfd: pytest.CaptureFixture[str]) -> None:
    quantize_(nn.Sequential(nn.Linear(64, 32)), "int4")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
