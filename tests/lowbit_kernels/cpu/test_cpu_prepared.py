"""Products on the CPU whose weight was checked in an earlier call: the same bits, and every change of the weight is seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowbit import QLinear, QTensor, Scheme, quantize_
from lowbit_kernels import cpu, reference
from lowbit_kernels.prepared_call import bind
from tests.support.processors import needs_split_int8

pytestmark = needs_split_int8

SCHEMES = (
    Scheme("int8", -1),
    Scheme("int4", 128, scale="fp32"),
    Scheme("uint4", 16, "int"),
    Scheme("uint4", 32, "int"),
    Scheme("uint4", 128, "int"),
    Scheme("int4", 32),
    Scheme("uint4", 48, "int", "fp16"),
    Scheme("int3", 64),
    Scheme("uint2", 32, "int"),
    Scheme("int6", 48),
    Scheme("ternary", 128),
    Scheme("fp6_e2m3", 32, scale="e8m0"),
    Scheme("mxint8", 32, scale="e8m0"),
    Scheme("fp4_e2m1", 16, scale="fp8_e4m3fn", outer=True),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def weight(scheme: Scheme, n: int, k: int) -> Parts:
    return reference.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)), scheme, "range")


def how(scheme: Scheme, limbs: int) -> tuple[Tensor, Tensor | None, int, int]:
    return *cpu.operator_args(scheme), limbs


def both(x: Tensor, parts: Parts, bias: Tensor | None, scheme: Scheme, limbs: int, *given: Tensor) -> tuple[Tensor, Tensor]:
    ops, arguments = torch.ops.lowbit_cpu, (*parts, bias, *how(scheme, limbs), *given)
    ready = ops.split_int8_gemv_prepare(x[..., :0, :] if x.dim() > 1 else x, *arguments)
    assert ready.dtype == torch.uint8
    assert ready.numel() > 0
    return ops.prepared_linear(x, ready), ops.split_int8_gemv(x, *arguments)


@settings(max_examples=40)
@given(
    scheme=st.sampled_from(SCHEMES),
    limbs=st.integers(1, 3),
    n=st.integers(1, 700),
    k=st.sampled_from((96, 640, 4096)),
    m=st.integers(1, 6),
    threads=st.integers(2, 4),
    data=st.data(),
)
def test_neighbours_change_no_bit(scheme: Scheme, limbs: int, n: int, k: int, m: int, threads: int, data: st.DataObject) -> None:
    """A number of y is of its own rows of x and the weight alone: not of what shares a tile, a turn or a call with them."""
    first = data.draw(st.integers(0, n - 1))
    past = data.draw(st.integers(first + 1, n))
    packed, scale, zero, outer = weight(scheme, n, k)
    x, before = torch.randn(m, k, generator=torch.Generator().manual_seed(m)), torch.get_num_threads()
    multiply = torch.ops.lowbit_cpu.split_int8_gemv
    some = packed[first:past], scale[first:past], None if zero is None else zero[first:past], outer
    try:
        torch.set_num_threads(threads)
        whole = multiply(x, packed, scale, zero, outer, None, *how(scheme, limbs))
        torch.set_num_threads(1)
        rows = [multiply(row, *some, None, *how(scheme, limbs)) for row in x]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole[:, first:past], torch.stack(rows))


def layer_of(recipe: str, n: int = 24, k: int = 320, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> QLinear:
    model = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype))
    quantize_(model, recipe)
    made = model[0]
    assert isinstance(made, QLinear)
    return made


def operator(layer: QLinear, x: Tensor) -> Tensor:
    """What is never prepared."""
    w = layer.weight
    parts = (w.packed, w.scale, w.zero_point, w.outer, layer.bias, w.scheme_str, w.byte_layout)
    if layer.activation is None:
        return torch.ops.lowbit.linear(x, *parts)
    return torch.ops.lowbit.quantized_linear(x, *parts, str(layer.activation), layer.input_scale)


def equal(y: Tensor, expected: Tensor) -> bool:
    return y.dtype == expected.dtype and y.shape == expected.shape and torch.equal(y.isnan(), expected.isnan()) and torch.equal(
        y.nan_to_num(0), expected.nan_to_num(0)
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SCHEMES), st.sampled_from(DTYPES), st.integers(1, 3), st.integers(0, 64), st.integers(1, 40),
    st.integers(1, 1100), st.booleans(), st.sampled_from([None, "inf", "-inf", "nan"]),
)  # fmt: skip
def test_prepared_or_not_the_bits_are_the_same(
    scheme: Scheme, dtype: torch.dtype, limbs: int, m: int, n: int, k: int, biased: bool, broken: str | None
) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    if broken and m and limbs > 1:
        x[m // 2, k // 2] = float(broken)
    y, expected = both(x, weight(scheme, n, k), torch.linspace(-1, 1, n) if biased else None, scheme, limbs)
    assert equal(y, expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_x_of_any_shape_and_stride(scheme: Scheme) -> None:
    parts = weight(scheme, 9, 160)
    for x in (torch.randn(160), torch.randn(2, 3, 160), torch.randn(1, 2, 1, 1, 2, 160), torch.randn(3, 320)[:, ::2]):
        assert equal(*both(x, parts, None, scheme, 2))
    assert equal(*both(torch.randn(70, 160), parts, None, scheme, 1))
    assert equal(*both(torch.randn(3, 160), parts, None, scheme, 1, torch.tensor(0.02)))


@pytest.mark.parametrize("limbs", [1, 2, 3])
def test_zero_points_that_are_no_codes(limbs: int) -> None:
    scheme = Scheme("uint4", 16, "int")
    parts = weight(scheme, 9, 160)
    x = torch.randn(2, 160)
    ops, arguments = torch.ops.lowbit_cpu, (*parts, None, *how(scheme, limbs))
    ready = ops.split_int8_gemv_prepare(x, *arguments)
    assert parts[2] is not None
    parts[2][3, 2] = 200  # after it was looked at
    if limbs == 1:
        with pytest.raises(RuntimeError, match="zero points must be codes"):
            ops.prepared_linear(x, ready)
    else:
        assert torch.equal(ops.prepared_linear(x, ready), ops.split_int8_gemv(x, *arguments))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_an_instruction_set_that_is_asked_for_later(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, parts, x = torch.ops.lowbit_cpu, weight(scheme, 9, 330), torch.randn(3, 330)
    arguments = (*parts, None, *how(scheme, 2))
    names = ["avx2", "avx512"][: 1 + (ops.instructions() == "avx512")]
    for prepared_for in names:
        monkeypatch.setenv("LOWBIT_CPU", prepared_for)
        ready = ops.split_int8_gemv_prepare(x, *arguments)
        for name in names:
            monkeypatch.setenv("LOWBIT_CPU", name)
            assert torch.equal(ops.prepared_linear(x, ready), ops.split_int8_gemv(x, *arguments)), (prepared_for, name)
        for wrong, message in (("portable", "no products of integers"), ("neon", "LOWBIT_CPU must be empty")):
            monkeypatch.setenv("LOWBIT_CPU", wrong)
            for call in (lambda: ops.prepared_linear(x, ready), lambda: ops.split_int8_gemv(x, *arguments)):  # noqa: B023
                with pytest.raises(RuntimeError, match=message):
                    call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "recipe", ["int8", "int4", "int4_sym", "int3", "fp4", "nvfp4", "mxfp4", "mxint8", "int8_dynamic_activation_int8_weight"]
)
@torch.no_grad()
def test_later_calls_give_the_bits_of_the_operator(recipe: str, dtype: torch.dtype) -> None:
    layer = layer_of(recipe, dtype=dtype)
    for m in (1, 4, 1, 64):
        for _ in range(4):
            x = torch.randn(m, 320, dtype=dtype)
            assert torch.equal(layer(x), operator(layer, x))


def held(layer: QLinear) -> dict[str, Tensor]:
    """Every tensor that a product of ``layer`` reads."""
    return {**layer.weight._parts(), **({} if layer.bias is None else {"bias": layer.bias})}


@pytest.mark.parametrize("recipe", ["int4", "nvfp4", "int8_dynamic_activation_int8_weight"])
@torch.no_grad()
def test_changed_parts_are_seen(recipe: str) -> None:
    layer, other = layer_of(recipe), layer_of(recipe)
    x = torch.randn(1, 320, dtype=torch.bfloat16)
    for change in ("in place", "exchanged"):
        for name, part in held(layer).items():
            for _ in range(3):
                layer(x)
            new = held(layer_of(recipe))[name]
            if change == "in place":
                part.copy_(new)
            else:
                part.data = new.data.clone()
            for _ in range(3):
                assert torch.equal(layer(x), operator(layer, x)), (change, name)
    for assign in (False, True):
        layer.load_state_dict(other.state_dict(), assign=assign)
        for _ in range(3):
            assert torch.equal(layer(x), other(x))
        other = layer_of(recipe)
    layer.weight.packed = other.weight.packed.clone()
    for _ in range(3):
        assert torch.equal(layer(x), operator(layer, x))
    layer.weight.packed.data = layer.weight.packed.data[:, :-16].contiguous()
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError), match="packed"):
            layer(x)


@pytest.mark.parametrize("name", ["packed", "scale", "zero_point", "bias"])
@torch.no_grad()
def test_rows_that_lie_further_apart_than_before_are_seen(name: str) -> None:
    """The same address and as many numbers, but others."""
    layer, x = layer_of("int4"), torch.randn(1, 320, dtype=torch.bfloat16)
    part = held(layer)[name]
    wide = torch.cat([part.data, part.data.flip(0)])
    for rows in (wide[:24], wide[::2], wide[:24]):
        part.data = rows
        for _ in range(3):
            assert torch.equal(layer(x), operator(layer, x))


@torch.no_grad()
def test_a_fixed_scale_of_x_is_read_in_each_call() -> None:
    scheme = Scheme("int8", 32)
    run, parts, x = bind(cpu.quantized_linear, scheme), weight(scheme, 9, 160), torch.randn(2, 160)
    scale = torch.tensor(0.02)
    for made in (scale, scale.half(), None, scale):
        for factor in (1, 1, 1, 3):
            scale *= factor
            y = run(x, *parts, None, scheme, Scheme("int8", -1), made)
            reported = () if made is None else (made.float(),)
            assert torch.equal(y, torch.ops.lowbit_cpu.split_int8_gemv(x, *parts, None, *how(scheme, 1), *reported))


@torch.no_grad()
def test_what_has_to_be_copied_is_not_prepared() -> None:
    scheme = Scheme("int8", 32)
    parts, x = weight(scheme, 9, 160), torch.randn(2, 160)
    bias = torch.randn(9)
    apart = tuple(None if part is None else part.repeat_interleave(2, -1)[..., ::2] for part in parts)
    ops, expected = torch.ops.lowbit_cpu, torch.ops.lowbit_cpu.split_int8_gemv(x, *parts, bias, *how(scheme, 3))
    run = bind(cpu.split_int8_gemv, scheme)
    for some in ((apart[0], *parts[1:], bias), (parts[0], apart[1], *parts[2:], bias), (*parts, bias.repeat_interleave(2)[::2])):
        assert ops.split_int8_gemv_prepare(x, *some, *how(scheme, 3)).numel() == 0
        for _ in range(3):
            assert torch.equal(run(x, *some, scheme), expected)
    wide = torch.zeros(9, 200, dtype=torch.uint8)
    wide[:, 20:180] = parts[0]
    part = (wide[:, 20:180], *parts[1:], bias)  # rows may lie apart
    assert ops.split_int8_gemv_prepare(x, *part, *how(scheme, 3)).numel() > 0
    for _ in range(3):
        assert torch.equal(run(x, *part, scheme), expected)


def test_what_does_not_fit_is_refused() -> None:
    scheme = Scheme("int8", 32)
    parts, x, ops = weight(scheme, 9, 160), torch.randn(2, 160), torch.ops.lowbit_cpu
    ready = ops.split_int8_gemv_prepare(x, *parts, None, *how(scheme, 3))
    for wrong, message in (
        (x[:, :150], "x must have the 160 columns that this was prepared for, got 150"),
        (x[0, 0], "x must be float32"),
        (x.double(), "x must be float32"),
        (x.int(), "x must be float32"),
        (x[:1].expand(65, -1), "at most 64 rows, got 65"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.prepared_linear(wrong, ready)
    damaged, moved = ready.clone(), torch.zeros(ready.numel() + 1, dtype=torch.uint8)[1:]
    damaged[3] ^= 1
    moved.copy_(ready)
    longer = torch.cat([ready, ready[:8]])
    for bytes_ in (ready[:-4], longer, damaged, moved, torch.zeros_like(ready), ready[:0], ready.view(torch.int8), x):
        with pytest.raises(RuntimeError, match="prepared must be what split_int8_gemv_prepare returned"):
            ops.prepared_linear(x, bytes_)
    assert torch.equal(ops.prepared_linear(x, ready.clone()), ops.split_int8_gemv(x, *parts, None, *how(scheme, 3)))
    with pytest.raises(RuntimeError, match="limbs must be 1, 2 or 3, got 4"):
        ops.split_int8_gemv_prepare(x, *parts, None, *how(scheme, 4))
    with pytest.raises(RuntimeError, match="packed must be a CPU tensor"):
        ops.split_int8_gemv_prepare(x[:, :150], *parts, None, *how(scheme, 3))


@torch.no_grad()
def test_a_view_of_a_weight_is_read_in_place() -> None:
    scheme = Scheme("uint4", 32, "int")
    q = QTensor.quantize(torch.randn(24, 256, generator=torch.Generator().manual_seed(0)), scheme)
    part, x = QLinear(q[3:20, 64:192]), torch.randn(2, 128)
    for _ in range(3):
        assert torch.equal(part(x), operator(part, x))
