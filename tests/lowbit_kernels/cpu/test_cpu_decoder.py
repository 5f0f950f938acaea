"""Steps through decoder layers beside their reference in torch, in float64 and in the dtype of x."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import QTensor
from lowbit_kernels import cpu_decoder, registry
from lowbit_kernels.ops import product_call
from tests.support.processors import needs_split_int8

pytestmark = needs_split_int8
HIDDEN, BETWEEN = 96, 160


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def made(dtype: torch.dtype, heads: tuple[int, int, int], normed: bool) -> tuple[cpu_decoder.Layer, Any, list[Tensor]]:
    """A layer with random weights, prepared for the rows that one token takes, and its weights in float64."""
    generator = torch.Generator().manual_seed(5)
    count, keys, size = heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    products, kernels, weights = [], [], []
    shapes = [(count * size, HIDDEN), (keys * size, HIDDEN), (keys * size, HIDDEN), (HIDDEN, count * size)]
    for n, k in (*shapes, (BETWEEN, HIDDEN), (BETWEEN, HIDDEN), (HIDDEN, BETWEEN)):
        q = QTensor.quantize(random(n, k) / k**0.5, "int4_g16")
        parts, bias = (q.packed, q.scale, q.zero_point, q.outer), random(n).to(dtype) if n == keys * size else None
        x = torch.empty(1, k, dtype=dtype)
        kernels.append(registry.select(product_call("linear", q.scheme_str, q.byte_layout, x, *parts, bias)))
        products.append(cpu_decoder.Product(*parts, bias, q.scheme, k))
        weights.append(q.dequantize(torch.float32).double())
    norms = [random(n).to(dtype) for n in (HIDDEN, HIDDEN, *([size, size] if normed else []))]
    layer = cpu_decoder.Layer(tuple(products), tuple(norms), (1e-5,) * len(norms), count, keys, size, 0.3)
    prepared = cpu_decoder.prepared(layer, kernels)
    assert prepared is not None
    return layer, prepared, weights


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 48), (2, 2, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", ["none", "bool", "float"])
def test_a_step_errs_no_more_than_its_reference(
    masked: str, dtype: torch.dtype, heads: tuple[int, int, int], normed: bool
) -> None:
    """The reference in the dtype of x rounds where a step does; float64 tells how much either errs."""
    layer, prepared, weights = made(dtype, heads, normed)
    batch, tokens, past = 2, 1 if masked == "none" else 3, 37
    places = past + tokens
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batch, tokens, HIDDEN, generator=generator).to(dtype)
    angles = torch.rand(batch, tokens, heads[2] // 2, generator=generator).repeat(1, 1, 2)
    turns = angles.cos().to(dtype), angles.sin().to(dtype)
    room = torch.randn(2, batch, heads[1], places + 5, heads[2], generator=generator).to(dtype)
    mask = None
    if masked != "none":
        seen = torch.rand(batch, 1, tokens, places, generator=generator) < 0.6
        seen[..., -1] = True
        mask = seen if masked == "bool" else torch.where(seen, 0.0, -9.0).to(dtype)

    def reference(of: torch.dtype) -> tuple[Tensor, Tensor]:
        kept = room.to(of).clone()
        cos, sin = (turn.to(of) for turn in turns)
        wide = mask if mask is None or mask.dtype == torch.bool else mask.to(of)
        some = [weight.to(of) for weight in weights]
        y = cpu_decoder.reference_step(x.to(of), layer, some, (cos, sin), (kept[0], kept[1]), past, places, wide)
        return y, kept

    kept = room.clone()
    y = cpu_decoder.steps(x, prepared[-1:], turns, [kept[0]], [kept[1]], past, places, mask)
    assert isinstance(y, Tensor)
    assert torch.equal(kept[:, :, :, places:], room[:, :, :, places:])
    assert torch.equal(kept[:, :, :, :past], room[:, :, :, :past])
    (want, filled), (apart, predicate) = reference(torch.float64), reference(dtype)
    for got, theirs, exact in ((y, apart, want), (kept, predicate, filled)):
        # Three limbs hold 2^-22 of the largest number in a slice, which is a few times the usual one, in four products.
        assert rms(got.double() - exact) <= 2 * rms(theirs.double() - exact) + 2.0**-19 * rms(exact)


@pytest.mark.parametrize("count", [1, 3])
def test_layers_follow_each_other(count: int) -> None:
    """Several layers in one call are those of as many calls, to the bit."""
    layer, prepared, _ = made(torch.bfloat16, (4, 2, 16), True)
    x, turn = torch.randn(2, 1, HIDDEN, dtype=torch.bfloat16), torch.rand(1, 1, 16).bfloat16()
    room = torch.randn(2, count, 2, 2, 9, 16, dtype=torch.bfloat16)
    at_once, apart, y = room.clone(), room.clone(), x
    got = cpu_decoder.steps(x, prepared[-1:] * count, (turn, turn), list(at_once[0]), list(at_once[1]), 8, 9, None)
    for i in range(count):
        stepped = cpu_decoder.steps(y, prepared[-1:], (turn, turn), [apart[0, i]], [apart[1, i]], 8, 9, None)
        assert isinstance(stepped, Tensor)
        y = stepped
    assert isinstance(got, Tensor)
    assert torch.equal(got, y)
    assert torch.equal(at_once, apart)
    del layer  # which has what is read


def test_what_does_not_fit_is_refused() -> None:
    layer, prepared, _ = made(torch.float32, (4, 2, 16), False)
    x, turn, kept = torch.randn(1, 1, HIDDEN), torch.ones(1, 1, 16), torch.zeros(1, 2, 8, 16)
    good: dict[str, Any] = {
        "x": x, "layers": prepared[-1:], "turns": (turn, turn), "keys": [kept], "values": [kept], "past": 3, "places": 4,
        "mask": None,
    }  # fmt: skip
    assert isinstance(cpu_decoder.steps(**good), Tensor)
    bools = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    for name, wrong in (
        ("x", x.bfloat16()), ("x", x[..., :64]), ("x", x[0]), ("turns", (turn[..., :8], turn)), ("keys", [kept[:, :1]]),
        ("values", [kept.half()]), ("keys", [kept.transpose(2, 3)]), ("past", -1), ("past", 4), ("places", 9),
        ("mask", bools), ("mask", bools[0, ..., :4]),
    ):  # fmt: skip
        assert isinstance(cpu_decoder.steps(**{**good, name: wrong}), str), name
    freed = torch.zeros(1, 2, 8, 16)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        cpu_decoder.steps(**{**good, "keys": [freed]})
    with pytest.raises(RuntimeError, match="decoder_prepared"):
        cpu_decoder.steps(**{**good, "layers": [torch.zeros_like(prepared[-1])]})
    with pytest.raises(RuntimeError, match="seven"):
        torch.ops.lowbit_cpu.decoder_prepared(list(prepared[:3]), list(layer.norms), [1e-5, 1e-5], 4, 2, 16, 1.0)


def test_tokens_that_see_nothing_take_nothing() -> None:
    """As torch has it: no place's value is theirs, and not NaN."""
    layer, prepared, _ = made(torch.float32, (4, 2, 16), False)
    x, turn = torch.randn(1, 1, HIDDEN), torch.ones(1, 1, 16)
    mask, results = torch.zeros(1, 1, 1, 4, dtype=torch.bool), []
    for number in (1.0, 2.0):
        kept = torch.full((2, 1, 2, 4, 16), number)
        results.append(cpu_decoder.steps(x, prepared[-1:], (turn, turn), [kept[0]], [kept[1]], 3, 4, mask))
    assert torch.equal(*results)
    assert torch.isfinite(results[0]).all()
    del layer
