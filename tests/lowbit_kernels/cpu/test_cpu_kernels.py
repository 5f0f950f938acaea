"""What the CPU library promises beyond its row: every instruction set, any number of threads, slices, added formats."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import QTensor, strict
from lowbit.formats import FORMATS, Float
from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit_kernels import cpu, reference
from tests.support.accuracy import linear_bound
from tests.support.cpu_cases import SCHEMES, Parts, hard_rows, linear, weight
from tests.support.processors import needs_split_int8

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=cpu.available() or "")


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_instruction_set(scheme: Scheme, instructions: str) -> None:
    ranks = ["portable", "avx2", "avx512"]
    if ranks.index(instructions) > ranks.index(torch.ops.lowbit_cpu.instructions()):
        pytest.skip(f"this processor has no {instructions}")
    for k in (1, 2, 31, 33, 127, 128, 200):
        parts, w = weight(scheme, 11, k)
        for m in range(1, 9):
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
            x[:, ::7] *= 100
            exact = x.double() @ w.mT
            error = (linear(x, parts, scheme, instructions).double() - exact).abs()
            assert (error <= linear_bound("exact", x.double(), w, None, exact, torch.float32)).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_threads_change_no_bit(scheme: Scheme) -> None:
    parts, _ = weight(scheme, 517, 640)
    x, threads = torch.randn(3, 640), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(linear(x, parts, scheme))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], result) for result in results)


def test_slices_are_read_in_place() -> None:
    scheme = Scheme("uint4", 32, "int")
    (packed, scale, zero, _), w = weight(scheme, 24, 256)
    assert zero is not None
    x = torch.randn(2, 128)
    part = (packed[3:20, 32:96], scale[3:20, 2:6], zero[3:20, 2:6], None)
    exact = x.double() @ w[3:20, 64:192].mT
    error = (linear(x, part, scheme).double() - exact).abs()
    assert (error <= linear_bound("exact", x.double(), w[3:20, 64:192], None, exact, torch.float32)).all()


def test_a_format_added_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its codes hold NaN, which must not leak out of the bytes that two groups share or that pad a row.
    monkeypatch.setitem(FORMATS, "fp4_e2m1fn", Float("fp4_e2m1fn", 2, 1, "fn"))
    scheme = Scheme("fp4_e2m1fn", 5)
    parts, w = weight(scheme, 6, 33)
    parts[0][:, -1] |= 0xF0  # the padding behind an odd K
    x = torch.randn(2, 33)
    torch.testing.assert_close(linear(x, parts, scheme).double(), x.double() @ w.mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["fp4_e2m1", "int2", "fp6_e3m2"])
def test_scales_of_few_bits(scale: str) -> None:
    q = QTensor.quantize(torch.randn(6, 33, generator=torch.Generator().manual_seed(0)), Scheme("int4", 8, scale=scale))
    x = torch.randn(2, 33)
    with strict("cpu_gemv"):
        y = torch.nn.functional.linear(x, q)
    torch.testing.assert_close(y.double(), x.double() @ q.dequantize(torch.float64).mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, p: (x[:, :-1], p), "packed must be a CPU tensor"),
        (lambda x, p: (x.double(), p), "x must be float32, bfloat16 or float16"),
        (lambda x, p: (x.expand(65, -1), p), "at most 64 rows, got 65"),
        (lambda x, p: (x, (p[0], p[1].double(), None, None)), "scale must be float32"),
        (lambda x, p: (x, (p[0], p[1][:-1], None, None)), "scale must be a CPU tensor"),
        (lambda x, p: (x, (p[0], p[1], p[1], None)), "codes with a sign have no zero point"),
    ],
)
def test_what_it_refuses(change: Callable[..., tuple[Tensor, Parts]], message: str) -> None:
    scheme = Scheme("int8", 16)
    x, parts = change(torch.randn(1, 64), weight(scheme, 4, 64)[0])
    with pytest.raises(RuntimeError, match=message):
        linear(x, parts, scheme)
    with pytest.raises(RuntimeError, match="avx512, avx2 or portable, got neon"):
        linear(torch.randn(1, 64), weight(scheme, 4, 64)[0], scheme, "neon")


def test_runs_before_the_reference_whatever_was_imported_first() -> None:
    code = """
import lowbit_kernels.reference, lowbit_kernels.triton, lowbit_kernels.ops, torch
from lowbit_kernels.registry import Call, kernels, select
from lowbit.scheme import Scheme
print(select(Call("linear", "cpu", 0, "canonical", Scheme("int8"), torch.float32, 1, 8, 64)).name, kernels()[-1].name[:9])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu_gemv" if cpu._split_int8_available() else "cpu_split_int8x3_gemv", "reference"]


@pytest.mark.parametrize("forced", ["portable", "avx2", "avx512", "neon"])
def test_the_variable_forces_an_instruction_set(forced: str) -> None:
    ranks = ["portable", "avx2", "avx512"]
    if forced in ranks and ranks.index(forced) > ranks.index(torch.ops.lowbit_cpu.instructions()):
        pytest.skip(f"this processor has no {forced}")
    code = """
import torch
from lowbit import QTensor, Scheme, trace_kernels
from lowbit_kernels import cpu
x = torch.linspace(-3, 5, 200).reshape(1, 200).bfloat16()
w = torch.sin(torch.arange(7 * 200.0)).reshape(7, 200)
q = QTensor.quantize(w, Scheme("uint4", 32, "int"))
with trace_kernels() as trace:
    y = torch.nn.functional.linear(x, q)
print(torch.ops.lowbit_cpu.instructions(), *trace.kernels(), *y.flatten().tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, "LOWBIT_CPU": forced}
    )
    if forced == "neon":
        assert "LOWBIT_CPU must be empty, avx512, avx2 or portable, got neon" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    instructions, kernel, *numbers = done.stdout.split()
    assert instructions == forced
    assert kernel == "cpu_gemv" or forced != "portable"
    x = torch.linspace(-3, 5, 200).reshape(1, 200).bfloat16()
    q = QTensor.quantize(torch.sin(torch.arange(7 * 200.0)).reshape(7, 200), Scheme("uint4", 32, "int"))
    w = q.dequantize(torch.float64)
    exact = x.double() @ w.mT
    bound = linear_bound("split-int8 (2 limbs)", x.double(), w, None, exact, torch.bfloat16)
    assert ((torch.tensor([[float(n) for n in numbers]], dtype=torch.float64) - exact).abs() <= bound).all()


OF_STEPS = (
    *(Scheme(f"int{bits}", group) for bits in range(2, 8) for group in (16, 48, 128, 256, -1)),
    *(Scheme(f"uint{bits}", group, "int", "fp16") for bits in range(2, 7) for group in (16, 64, 256, -1)),
    *(Scheme("int8", group, scale="fp32") for group in (16, 64, -1)),
    *(Scheme(name, 32, scale="e8m0") for name in ("mxint8", "fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3fn", "fp8_e5m2")),
    *(Scheme(name, group) for name in ("ternary", "fp4_e2m1", "fp5_e2m2", "fp6_e2m3") for group in (16, 128)),
    *(Scheme(name, group) for name in ("nf4", "fp6_e3m2", "fp8_e4m3fn", "fp8_e5m2") for group in (32, 48, -1)),
    Scheme("fp4_e2m1", 16, scale="fp8_e4m3fn", outer=True),
)


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("scheme", OF_STEPS, ids=str)
def test_steps_of_every_instruction_set(scheme: Scheme, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ["portable", "avx2", "avx512"]
    if ranks.index(instructions) > ranks.index(torch.ops.lowbit_cpu.instructions()):
        pytest.skip(f"this processor has no {instructions}")
    monkeypatch.setenv("LOWBIT_CPU", instructions)
    values, scales = cpu.number_table(scheme.format), None if scheme.scale in PLAIN_SCALES else cpu.byte_table(scheme.scale)
    limbs = torch.ops.lowbit_cpu.supports_split_int8(values, scheme.zero_point == "int")
    assert limbs == (instructions != "portable" and cpu.are_small_integers(FORMATS[scheme.format]))
    for k in (1, 31, 127, 512, 700, 2100):
        w = torch.randn(9, k, generator=torch.Generator().manual_seed(k))
        w[:, ::31] *= 20
        w[1], w[2], w[3] = 0, w[2].abs(), w[3, :1]
        parts = reference.quantize(w, scheme, "range")
        w = reference.dequantize(*parts, scheme, k, torch.float64)
        for m, dtype in ((1, torch.bfloat16), (3, torch.float16), (7, torch.float32), (16, torch.bfloat16)):
            x = hard_rows(m, k, dtype, 2.0**-140)
            exact = x.double() @ w.mT
            contracts = {"split-int8 (2 limbs)": 2, "split-int8 (3 limbs)": 3} if limbs else {"exact": 0} if m <= 8 else {}
            for contract, count in contracts.items():
                arguments = (x, *parts, None, values, scales, scheme.group_size)
                name = "split_int8_gemv" if count else "linear"
                y = getattr(torch.ops.lowbit_cpu, name)(*arguments, *([count] if count else []))
                error, bound = (y.double() - exact).abs(), linear_bound(contract, x.double(), w, None, exact, dtype)
                assert ((error <= bound) | (exact.abs() + bound > torch.finfo(dtype).max)).all(), (contract, m, k, dtype)
            if limbs:  # x rounded to eight bits
                largest = x.float().abs().amax(-1, keepdim=True) / 127
                rounded = (x.float() / largest).nan_to_num().round().clamp(-128, 127).double() * largest.double()
                y = torch.ops.lowbit_cpu.split_int8_gemv(x, *parts, None, values, scales, scheme.group_size, 1)
                exact = rounded @ w.mT
                error, bound = (y.double() - exact).abs(), linear_bound("exact", rounded, w, None, exact, dtype)
                assert ((error <= bound) | (exact.abs() + bound > torch.finfo(dtype).max)).all(), ("one limb", m, k, dtype)


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2", "fp6_e3m2", "nf4", "fp5_e2m2", "int5"])
def test_numbers_of_every_size_are_within_the_bound(name: str, instructions: str) -> None:
    ranks = ["portable", "avx2", "avx512"]
    if ranks.index(instructions) > ranks.index(torch.ops.lowbit_cpu.instructions()):
        pytest.skip(f"this processor has no {instructions}")

    @given(
        exponents=st.lists(st.tuples(st.integers(-149, 90), st.integers(-149, 90)), min_size=1, max_size=8),
        k=st.sampled_from((1, 33, 128, 300)),
        group=st.sampled_from((16, 32, -1)),
        scale=st.integers(-60, 24),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=40, deadline=None)
    def holds(exponents: list[tuple[int, int]], k: int, group: int, scale: int, dtype: torch.dtype, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        size = torch.stack([torch.empty(k).uniform_(min(ends), max(ends) + 1, generator=random) for ends in exponents])
        x = (torch.randn(len(exponents), k, generator=random).sign() * torch.exp2(size)).to(dtype)
        scheme = Scheme(name, group)
        parts = reference.quantize(torch.randn(7, k, generator=random) * 2.0**scale, scheme, "range")
        w = reference.dequantize(*parts, scheme, k, torch.float64)
        exact = x.double() @ w.mT
        error = (linear(x, parts, scheme, instructions).double() - exact).abs()
        bound = linear_bound("exact", x.double(), w, None, exact, dtype)
        assert ((error <= bound) | (exact.abs() + bound > torch.finfo(dtype).max)).all()

    holds()


@pytest.mark.parametrize("instructions", ["avx2", "avx512"])
def test_nan_in_a_weight(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if instructions == "avx512" and torch.ops.lowbit_cpu.instructions() != "avx512":
        pytest.skip("this processor has no avx512")
    monkeypatch.setenv("LOWBIT_CPU", instructions)
    for k in (64, 90):
        parts, _ = weight(scheme := Scheme("fp8_e4m3fn", 32, scale="e8m0"), 7, k)
        parts[0][2, 5], parts[0][6, -1] = 0x7F, 0xFF
        y = linear(torch.zeros(3, k), parts, scheme)
        assert torch.equal(y.isnan().all(0), torch.tensor([False, False, True, False, False, False, True]))
        assert torch.equal(y.isnan().any(0), y.isnan().all(0))


@needs_split_int8
@pytest.mark.parametrize("instructions", ["avx2", ""])
@pytest.mark.parametrize(
    "scheme", [Scheme("int8"), Scheme("uint4", 128, "int"), Scheme("fp4_e2m1", 16), Scheme("int3", 32)], ids=str
)
def test_infinities_and_nan_have_no_digits(scheme: Scheme, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if instructions:
        monkeypatch.setenv("LOWBIT_CPU", instructions)
    parts, _ = weight(scheme, 9, 256)
    values, scales = cpu.number_table(scheme.format), None if scheme.scale in PLAIN_SCALES else cpu.number_table(scheme.scale)
    for number in (float("inf"), float("-inf"), float("nan")):
        x = torch.randn(2, 256)
        whole = torch.ops.lowbit_cpu.split_int8_gemv(x, *parts, None, values, scales, scheme.group_size, 3)
        x[1, 77] = number
        y = torch.ops.lowbit_cpu.split_int8_gemv(x, *parts, None, values, scales, scheme.group_size, 3)
        assert torch.equal(y[0], whole[0])
        assert torch.equal(y[1].nan_to_num(7e30), linear(x, parts, scheme)[1].nan_to_num(7e30))


@needs_split_int8
@given(m=st.integers(1, 200), some=st.integers(1, 64), shape=st.sampled_from(((200,), (2, 100), (5, 4, 10))))
@settings(max_examples=20, deadline=None)
def test_rows_rounded_to_int8_do_not_depend_on_each_other(m: int, some: int, shape: tuple[int, ...]) -> None:
    scheme, random = Scheme("int4", 32), torch.Generator().manual_seed(m)
    parts, rows = weight(scheme, 9, 256)[0], Scheme("int8", -1, scale="fp32")
    x = torch.randn(200, 256, generator=random).bfloat16()
    y = cpu.quantized_linear(x.reshape(*shape, 256), *parts, None, scheme, rows, None)
    assert y.shape == (*shape, 9)
    alone = cpu.quantized_linear(x[:m][-some:], *parts, None, scheme, rows, None)
    assert torch.equal(alone, y.reshape(200, 9)[:m][-some:])


def test_nothing_to_do() -> None:
    scheme = Scheme("int8", 16)
    parts, _ = weight(scheme, 4, 64)
    assert linear(torch.empty(0, 64), parts, scheme).shape == (0, 4)
    empty = (parts[0][:, :0], parts[1][:, :0], None, None)
    assert torch.equal(linear(torch.empty(2, 0), empty, scheme), torch.zeros(2, 4))
