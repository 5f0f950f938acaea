# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""GEMM of 8-bit codes with a scale a token and a scale a row of the weight.

   W codes [BLOCK_N, K step] --+
   x codes [K step, BLOCK_M] --+--dot--> s32 (floats: f32) --* x scale * W scale--> epilogue --> y [M, N]

Contract: exact: integer sums (floats: fp32 sums), rounded once. Limit: the bytes of W for few rows, the tensor cores for many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import _FLOATS
from .epilogue import store_output
from .float_bits import as_float_bits


@triton.jit
def _operand(codes, IS_FLOAT: tl.constexpr, MANTISSA: tl.constexpr, SPECIAL: tl.constexpr, FACTOR: tl.constexpr):
    """Bytes as operands of the tensor cores: int8, or 8-bit floats widened to float16, which is exact."""
    if IS_FLOAT:
        bits = as_float_bits(codes.to(tl.int32), tl.float16, _FLOATS, 8, 0, MANTISSA, SPECIAL)
        # 2**112: difference of the exponent biases 127 and 15
        missing: tl.constexpr = FACTOR / 5192296858534827628530496329220096.0
        return (bits.to(tl.float16, bitcast=True) * missing).to(tl.float16)
    else:
        return codes.to(tl.int8, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def w8a8_gemm(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, M, N, K, stride_x, stride_w, stride_scale,
    IS_FLOAT: tl.constexpr, MANTISSA: tl.constexpr, SPECIAL: tl.constexpr, FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, ONE_SCALE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M, BLOCK_N] of ``y`` [M, N]: sums of integers are exact, those of floats in float32."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask, n_mask = m < M, n < N
    wide_m = m.to(tl.int64)
    x_rows = x_ptr + wide_m * stride_x
    w_rows = w_ptr + n.to(tl.int64) * stride_w
    at = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if IS_FLOAT else tl.int32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + at
        x_mask, w_mask = m_mask[:, None], n_mask[None, :]
        if not EVEN:
            x_mask, w_mask = x_mask & (k < K)[None, :], w_mask & (k < K)[:, None]
        x = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0)
        w = tl.load(w_rows[None, :] + k[:, None], mask=w_mask, other=0)
        x, w = _operand(x, IS_FLOAT, MANTISSA, SPECIAL, FACTOR), _operand(w, IS_FLOAT, MANTISSA, SPECIAL, FACTOR)
        if IS_FLOAT:
            total = tl.dot(x, w, total)
        else:
            total = tl.dot(x, w, total, out_dtype=tl.int32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    x_scale = tl.load(x_scale_ptr + (tl.zeros_like(m) if ONE_SCALE else m), mask=m_mask, other=0.0)
    # a token without a finite scale gives NaN, whatever its codes
    x_scale = tl.where(tl.abs(x_scale) < float("inf"), x_scale, float("nan"))
    y = total.to(tl.float32) * x_scale[:, None]
    y *= tl.load(w_scale_ptr + n.to(tl.int64) * stride_scale, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    target, mask = y_ptr + wide_m[:, None] * N + n[None, :], m_mask[:, None] & n_mask[None, :]
    store_output(y, (bias_ptr + n)[None, :], n_mask[None, :], target, mask, HAS_BIAS, EPILOGUE)
