"""Padding counts nowhere: not in statistics, not in figures of layers, not in divergences; on either side, by whatever mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit import doctor, quantize_, sensitivity
from lowbit.calibration.data import Calibration
from lowbit.calibration.padding import Padding
from tests.ecosystem import test_architectures as architectures
from tests.lowbit.calibration.test_cache_and_loss import built
from tests.lowbit.calibration.test_calibrate import check_statistics, seen, spying  # noqa: F401 - a fixture
from tests.support.models import gpt2, llama

sides = pytest.mark.parametrize("side", ["left", "right"])
LENGTHS = (5, 9, 2)


def mask_of(lengths: tuple[int, ...], side: str, width: int = 9) -> Tensor:
    """1 where there is a token, for rows of these lengths."""
    places = torch.arange(width)
    places = places if side == "right" else places.flip(0)
    return (places < torch.tensor(lengths)[:, None]).long()


def padded(side: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Rows of random tokens of these lengths; what stands in the padding are tokens as well."""
    ids = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(sum(lengths)))
    return {"input_ids": ids, "attention_mask": mask_of(lengths, side)}


def rows_alone(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same rows one by one, without padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [{"input_ids": ids[mask.bool()][None]} for ids, mask in pairs]


def by_mask(name: str, x: Tensor, call: Any) -> Tensor:
    return x[call["attention_mask"].bool()]


# ---- statistics ------------------------------------------------------------------------------------------------------


@sides
@pytest.mark.parametrize("make", [llama, gpt2, lambda: architectures.build("bert"), lambda: architectures.build("qwen2_moe")])
def test_statistics(make, side, seen):  # noqa: F811
    """Also of layers that read rows and tokens as one dimension, as shared experts do."""

    def kept(name: str, x: Tensor, call: Any) -> Tensor:
        return by_mask(name, x if x.dim() == 3 else x.view(3, 9, -1), call)

    check_statistics(make(), [padded(side), padded(side, (3, 3, 9))], seen, kept)


@sides
@pytest.mark.parametrize("second", ["decoder_attention_mask", "labels"])
@pytest.mark.parametrize("name", ["mt5", "mbart", "marian"])
def test_statistics_of_two_rows_of_tokens_of_one_length(name, second, side, seen):  # noqa: F811
    """An encoder's padding is not the decoder's, and what a decoder reads of its encoder is the encoder's."""
    batch = padded(side)
    ids, mask = batch["input_ids"].flip(1), mask_of((7, 4, 3), "right")
    if second == "labels":
        batch["labels"] = torch.where(mask.bool(), ids, -100)
    else:
        batch |= {"decoder_input_ids": ids, second: mask}

    def kept(name: str, x: Tensor, call: Any) -> Tensor:
        crossing = "EncDecAttention" in name or "encoder_attn" in name
        of_encoder = "encoder." in name or (crossing and name.endswith((".k", ".v", "k_proj", "v_proj")))
        return x[(call["attention_mask"] if of_encoder else mask).bool()]

    check_statistics(built(name), [batch], seen, kept)


class Own(nn.Module):
    """A user's module: its mask has a place and no name that the data knows; tokens come first, and then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(96, 8), nn.Linear(8, 8), nn.Linear(8, 96)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = torch.where(attention_mask.bool()[..., None], self.table(ids), torch.nan)
        return self.b(self.a(x.transpose(0, 1)).transpose(0, 1))


@sides
def test_statistics_of_a_module_that_takes_its_mask_by_place(side, seen):  # noqa: F811
    """And that gives NaN for padding, where nothing was promised."""
    batch = tuple(padded(side).values())

    def kept(name: str, x: Tensor, call: Any) -> Tensor:
        return x[(call[1].T if x.shape[0] == 9 else call[1]).bool()]

    model = Own()
    original = copy.deepcopy(model)
    check_statistics(model, [batch], seen, kept)
    found = doctor(model, original, [batch])
    assert found.findings == ()
    assert all(layer.rows == sum(LENGTHS) for layer in found.layers)


def test_inputs_that_only_look_like_tokens_are_kept():
    model = llama()
    (batch,) = Calibration.of([padded("right")]).batches(model)
    padding = Padding(model)
    for shape in ((3, 8), (9, 8), (4, 9, 8), (27,), (3, 9)):
        x = torch.randn(shape)
        assert padding.without_padding(x, batch) is x
    assert padding.without_padding(torch.randn(3, 9, 4, 8), batch).shape == (16, 4, 8)
    assert padding.without_padding(batch.kwargs["input_ids"], batch).shape == (16,)
    whole = {**padded("right"), "attention_mask": torch.ones(3, 9)}
    (batch,) = Calibration.of([whole]).batches(model)
    x = torch.randn(3, 9, 8)
    assert padding.without_padding(x, batch) is x


# ---- figures ---------------------------------------------------------------------------------------------------------


@sides
def test_doctor(side):
    """What it says of padded rows is what it says of them one by one."""
    original = llama(tied=False)
    model = copy.deepcopy(original)
    quantize_(model, "int4")
    batch = padded(side)
    found, alone = doctor(model, original, [batch]), doctor(model, original, rows_alone(batch))
    assert found.kl == pytest.approx(alone.kl, rel=1e-3)
    assert found.agreement == alone.agreement
    for ours, theirs in zip(found.layers, alone.layers, strict=True):
        assert ours.rows == theirs.rows == sum(LENGTHS)
        for name in ("output_db", "expected_output_db", "model_db"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=0.01), (ours.name, name)
    for (_, ours), (_, theirs) in zip(found.blocks, alone.blocks, strict=True):
        assert ours == pytest.approx(theirs, abs=0.01)


@sides
def test_doctor_looks_at_no_number_of_padding(side):
    """A model that gives infinity there overflows nowhere, and a float model that does is no reason to refuse."""

    class Spoiling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama(tied=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            logits = self.inner(input_ids, attention_mask=attention_mask).logits
            return logits.masked_fill(~attention_mask.bool()[..., None], torch.inf)

    original = Spoiling()
    model = copy.deepcopy(original)
    quantize_(model, "int8")
    found = doctor(model, original, [padded(side)])
    assert found.verdict == "clean"
    assert found.kl is not None
    assert found.kl < 0.01


@sides
def test_sensitivity(side):
    model, batch = llama(tied=False), padded(side)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that a divergence is far above what float32 does to logarithms, some 1e-7
    settings: dict[str, Any] = {"schemes": ["int3", "clip(int4)"], "layers": ["*0.mlp*"]}
    found, alone = sensitivity(model, [batch], **settings), sensitivity(model, rows_alone(batch), **settings)
    assert found.tokens == alone.tokens == sum(LENGTHS)
    for ours, theirs in zip(found.layers, alone.layers, strict=True):
        for name, cost in ours.costs.items():
            wanted = theirs.costs[name]
            assert cost.bits == wanted.bits
            assert cost.error == pytest.approx(wanted.error, rel=1e-3)
            assert cost.kl == pytest.approx(wanted.kl, rel=1e-3, abs=1e-6)


def test_a_decoders_predictions_are_counted_by_its_own_mask():
    original = built("mt5")
    batch = {**padded("right"), "labels": torch.where(mask_of((7, 4, 3), "right").bool(), padded("left")["input_ids"], -100)}
    found = sensitivity(original, [batch], ["int4"], layers=["*0*wi*"])
    assert found.tokens == 14
