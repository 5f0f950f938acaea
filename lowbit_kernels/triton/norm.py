# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""RMSNorm of a token, rounded to eight bits with a scale a token, in one pass: what several products read."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import divided, nearest


@triton.jit
def rms_norm_quantize(
    x_ptr, weight_ptr, codes_ptr, scale_ptr, K, share, eps, stride_x,
    BITS: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, FIRST: tl.constexpr, INVERSE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, NAN: tl.constexpr, COUNT: tl.constexpr, REACH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of ``x`` [M, K], held whole: its codes [M, K] and its scale [M]. ``REACH``: the number of the largest. ``share``:
    1 / K, what a square counts for in the mean.

    All numbers of a token are divided by one root, so codes depend on ``x`` times the weight alone, and the root meets the scale:
    nothing waits for the sum of squares but one number.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = None if EVEN else column < K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
    numbers = x * weight if HAS_WEIGHT else x
    # The bits of magnitudes order as the numbers do, with infinity and then NaN above them.
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    largest = (tl.zeros([1], tl.int32) + largest).to(tl.float32, bitcast=True)
    # Below it the numbers of a code would pass float32, and the row has fewer of them.
    held = tl.where(largest < 3.009265538105056e-36, 3.009265538105056e-36, largest)  # 2**-118; NaN stays
    root = tl.math.sqrt_rn((tl.zeros([1], tl.float32) + tl.sum(x * x, axis=0)) * share + eps)
    scale = tl.where(largest == 0.0, 0.0, divided(held, root * REACH))
    tl.store(scale_ptr + row + tl.zeros([1], tl.int32), scale)
    quotient = numbers * divided(tl.full([1], REACH, tl.float32), held)
    codes = nearest(quotient, codes_ptr, codes_ptr, KIND, BITS, MANTISSA, FIRST, INVERSE, LOW, HIGH, NAN, COUNT)
    tl.store(codes_ptr + row * K + column, codes.to(tl.uint8), mask=mask)
