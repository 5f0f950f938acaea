# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""RMSNorm of a token, quantized to 8 bits with a scale a token, in one pass: several products read the codes.

   x row [K] --load once--> registers --max |x w|--> scale' --> codes [K]
                                 +------ mean(x^2) --> 1 / root --* scale'--> scale

Contract: the codes of x times the norm's weight; the root is applied to the scale alone. Limit: the bytes of x.
"""

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
    """One token of ``x`` [M, K], held in registers: codes [M, K] and scale [M]. ``REACH``: code value of the largest magnitude.
    ``share``: 1 / K.

    All values of a token are divided by one root, so codes depend only on ``x`` times the weight and the root is applied to the
    scale: only one value waits for the sum of squares.
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
    # Bits of magnitudes are ordered like values, with infinity and then NaN above them.
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    largest = (tl.zeros([1], tl.int32) + largest).to(tl.float32, bitcast=True)
    # Smaller rows would overflow float32 in x / scale; they use fewer codes.
    held = tl.where(largest < 3.009265538105056e-36, 3.009265538105056e-36, largest)  # 2**-118; NaN stays
    root = tl.math.sqrt_rn((tl.zeros([1], tl.float32) + tl.sum(x * x, axis=0)) * share + eps)
    scale = tl.where(largest == 0.0, 0.0, divided(held, root * REACH))
    tl.store(scale_ptr + row + tl.zeros([1], tl.int32), scale)
    quotient = numbers * divided(tl.full([1], REACH, tl.float32), held)
    codes = nearest(quotient, codes_ptr, codes_ptr, KIND, BITS, MANTISSA, FIRST, INVERSE, LOW, HIGH, NAN, COUNT)
    tl.store(codes_ptr + row * K + column, codes.to(tl.uint8), mask=mask)
