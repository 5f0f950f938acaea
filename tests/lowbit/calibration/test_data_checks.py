"""Calibration data that cannot be enough is refused before work starts; what may be too little is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import Calibration, doctor, quantize_
from lowbit.command import run
from tests.support.models import gpt2, llama, word_model

METHODS = ["gptq(int4_g32)", "clip(int4_g32)", "awq(int4_g32)", "smoothquant(int8_dynamic_activation_int8_weight)"]
METHODS += ["int8_static_activation_int8_weight"]


def wide(k: int = 512) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, 16), nn.ReLU(), nn.Linear(16, 4))


def words(count: int) -> list[torch.Tensor]:
    """Rows of ``count`` token ids in all."""
    return list(torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(0)).split(40))


def unchanged(model: nn.Module) -> bool:
    return not any(isinstance(parameter, lowbit.QTensor) for parameter in model.parameters())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_tokens_against_the_channels_that_a_layer_reads(make: Any, method: str) -> None:
    k = 172 if make is llama else 192
    model, least = make(), -(-k // 16)
    with pytest.raises(
        ValueError, match=rf"{least - 1} tokens cannot calibrate .*, which reads {k} channels: K / 16 are the least"
    ):
        quantize_(model, method, calibration=words(least - 1))
    assert unchanged(model)
    few = quantize_(copy.deepcopy(model), method, calibration=words(k - 1))
    assert any(note.startswith(f"calibrated on {k - 1} tokens, fewer than the {k} channels that ") for note in few.notes)
    enough = quantize_(copy.deepcopy(model), method, calibration=words(k))
    assert not any("tokens" in note for note in enough.notes)


def test_padding_is_no_token() -> None:
    mask = torch.ones(4, 40, dtype=torch.long)
    mask[:, 2:] = 0
    batch = {"input_ids": torch.stack(words(160)), "attention_mask": mask}
    with pytest.raises(ValueError, match="8 tokens cannot calibrate"):
        quantize_(llama(), "gptq(int4_g32)", calibration=[batch])


@pytest.mark.parametrize("data", [[[7] * 50] * 6, torch.full((6, 50), 7), [{"input_ids": torch.full((6, 50), 7)}]])
def test_one_token_over_and_over(data: Any) -> None:
    model = llama()
    with pytest.raises(ValueError, match="repeats 1 different tokens, and 8 are the least"):
        quantize_(model, "gptq(int4_g32)", calibration=data)
    assert unchanged(model)


def test_numbers_count_by_rows() -> None:
    with pytest.raises(ValueError, match="31 tokens cannot calibrate 0, which reads 512 channels"):
        quantize_(wide(), "gptq(int4_g32)", calibration=torch.randn(31, 512))
    quantize_(wide(), "gptq(int4_g32)", calibration=torch.randn(2, 16, 512))


def test_a_method_that_looks_at_no_data_takes_any() -> None:
    """It measures the loss with it."""
    plan = quantize_(llama(), "int4_g32", calibration=words(2))
    assert not any("tokens" in note for note in plan.notes)


def test_rows_that_were_asked_for() -> None:
    plan = quantize_(llama(), "gptq(int4_g32)", calibration=Calibration(words(200)[:3], rows=5))
    assert "the calibration data holds 3 rows, and 5 were asked for" in plan.notes


@pytest.mark.parametrize("text", ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w1", " " * 500, "w3 " * 400])
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_on_the_command_line(text: str, stream: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = word_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(text)
    command = ["quantize", source, "-r", "gptq(int4_g16)", "-o", tmp_path / "out", "--calibration", tmp_path / "text.txt"]
    command += ["--max-memory", "1GB"] if stream else []
    assert run([*map(str, command)]) == 1
    said = capsys.readouterr().err
    assert any(part in said for part in ("32 are the least", "different tokens", "holds no row"))
    assert not (tmp_path / "out").exists()


def test_doctor_names_a_method_that_is_below_rounding_to_nearest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 32))
    mix = torch.randn(256, 256) / 16
    few, many, held = (torch.randn(count, 256) @ mix for count in (20, 4096, 512))
    found = {}
    for name, data in (("few", few), ("many", many)):
        quantized = copy.deepcopy(model)
        quantize_(quantized, "gptq(int3_g32)", calibration=data)
        found[name] = doctor(quantized, model, held)
    assert (found["few"].verdict, found["many"].verdict) == ("method", "clean")
    assert found["few"].rtn_gap_db < 0 < found["many"].rtn_gap_db
    assert "0" in {layer.name for layer in found["few"].worse_than_rtn}
    assert found["few"].to_dict()["worse_than_rtn"] == [layer.name for layer in found["few"].worse_than_rtn]
    assert "worse than rounding to nearest" in str(found["few"])
    assert doctor(quantized, model).verdict == "clean"  # without data nobody can tell
