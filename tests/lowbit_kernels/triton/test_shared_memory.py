"""Triton's blocks fit the shared memory of the GPU that they are chosen for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit import Scheme
from lowbit_kernels.triton import blocks, tables

SCHEMES = ("uint4:g128:zint:bf16", "int8:row:fp32", "nf4:g64:fp8_e4m3fn", "int1:g16:fp16", "fp8_e4m3fnuz:g48:e8m0")
LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes a block, by compute capability: CUDA's programming guide


@pytest.mark.parametrize("capability", LIMITS)
def test_compiled_blocks_fit(capability):
    pytest.importorskip("triton", reason="triton is built for Linux on x86-64")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.shared_memory", str(capability), str(LIMITS[capability])]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 12
    for case in cases:
        assert case["shared"] <= min(case["held"], LIMITS[capability]), case


@given(
    name=st.sampled_from(SCHEMES), m=st.integers(1, 5000), n=st.integers(1, 30000), k=st.integers(1, 30000),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)), limit=st.integers(64, 256),
    kernel=st.sampled_from(("gemm", "w8a8_gemm")),
)  # fmt: skip
def test_fitted_blocks_hold_no_more_than_the_limit_and_what_fits_is_left_alone(name, m, n, k, dtype, limit, kernel):
    scheme = Scheme.parse(name)
    rule = blocks.rule(kernel, scheme, dtype, m, n, k)
    chosen = blocks.fitted(kernel, rule, scheme, dtype, k, limit * 1024)
    assert tables.is_block(kernel, chosen)
    assert blocks.shared_bytes(kernel, chosen, scheme, dtype, k) <= limit * 1024
    if blocks.shared_bytes(kernel, rule, scheme, dtype, k) <= limit * 1024:
        assert chosen == rule
    measured = blocks.candidates(kernel, scheme, dtype, m, n, k, limit * 1024)
    assert measured[0] == chosen
    assert all(blocks.shared_bytes(kernel, one, scheme, dtype, k) <= limit * 1024 for one in measured)
