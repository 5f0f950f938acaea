"""Rounding on a CPU gives the bytes of the reference, and its refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.scheme import Scheme
from lowbit_kernels import cpu, reference
from lowbit_kernels.registry import kernels, trace

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=cpu.available() or "")


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", ["bf16", "fp16", "fp32"])
def test_quantize_gives_the_bytes_of_the_reference(
    instructions: str, dtype: torch.dtype, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ["portable", "avx2", "avx512"]
    if ranks.index(instructions) > ranks.index(torch.ops.lowbit_cpu.instructions()):
        pytest.skip(f"this processor has no {instructions}")
    monkeypatch.setenv("LOWBIT_CPU", instructions)
    row = next(row for row in kernels() if row.name == "cpu_quantize")
    for name in sorted(row.formats or ()):
        for group, k in ((-1, 33), (7, 50), (32, 96), (128, 300)):
            zero = "int" if name.startswith("uint") else "none"
            w = torch.randn(9, k, generator=torch.Generator().manual_seed(k)).to(dtype)
            w[:, ::13] *= 30
            w[2], w[3, : k // 2], w[4], w[5] = 0, -0.0, w[4].abs() + 1, -w[5].abs()
            w[6] *= 2.0**-12
            w[7] = torch.arange(k) / 2  # halves: ties go to even
            scheme = Scheme(name, group, zero, scale)
            w[8, :: group if group > 0 else k], w[8, 1 :: group if group > 0 else k] = 9, -9  # as far one way as the other
            for method in ("range", "absmax"):
                ours, theirs = row.run(w, scheme, method), reference.quantize(w, scheme, method)
                assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), scheme


@given(
    scheme=st.builds(
        lambda name, group, scale: Scheme(name, group, "int" if name.startswith("uint") else "none", scale),
        st.sampled_from(("int8", "int4", "uint4", "int3", "uint2")),
        st.sampled_from((-1, 5, 32)),
        st.sampled_from(("bf16", "fp16", "fp32")),
    ),
    shape=st.sampled_from(((3, 64), (2, 3, 33), (1, 1), (0, 64), (4, 0))),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    exponent=st.integers(-149, 126),
    wrong=st.sampled_from((None, None, float("inf"), float("nan"))),
    method=st.sampled_from(("range", "absmax", "mse")),
    seed=st.integers(0, 99),
)
@settings(max_examples=300, deadline=None)
def test_quantize_runs_what_the_trace_says(
    scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, wrong: float | None, method: str, seed: int
) -> None:
    """Also weights that are refused, with the words of the reference; and the row stands for no other one."""
    w = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).sub(0.5).mul(2.0**exponent).to(dtype)
    if wrong is not None and w.numel():
        w.view(-1)[w.numel() // 2] = wrong
    ours = method != "mse" and w.numel() > 0

    def outcome(quantize: Callable[[], tuple[Tensor | None, ...]]) -> list[list[object]] | str:
        try:
            return [[] if part is None else part.reshape(-1).tolist() for part in quantize()]
        except ValueError as error:
            return str(error)

    with trace() as record:
        found = outcome(lambda: torch.ops.lowbit.quantize(w, str(scheme), method))
    assert [*record.kernels()] == ["cpu_quantize" if ours else "reference_quantize"]
    if bool(w.isfinite().all()):
        assert found == outcome(lambda: reference.quantize(w, scheme, method))
    elif ours:
        assert isinstance(found, str)  # of another matrix, perhaps, a scale that underflows
