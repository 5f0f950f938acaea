# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""Quantizes rows of weights or activations to nearest: packed codes, scales and zero points.

   x [R, K] --load--> group of each row --min, max--> scale, zero_point --nearest--> codes --store_codes--> packed [R, bytes]

Contract: the bytes of the reference, in float32 with IEEE division. Limit: the bytes of x, read once where a group fits a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.decoding import FLOATS

from .codes import _POWERS, numbers
from .rounding import bfloat16_bits, divided, nearest, store_codes

_FLOATS = tl.constexpr(FLOATS)


@triton.jit
def _wider(high, low, x):
    """Running maximum of ``x`` and of ``-x`` for each row [R], as float32 bits: for values from 0 on these are ordered like the
    values, with infinity and then NaN above them.
    """
    bits = x.to(tl.int32, bitcast=True)
    opposite = bits ^ -2147483648
    high = tl.maximum(high, tl.max(tl.max(bits, axis=2), axis=1))
    return high, tl.maximum(low, tl.max(tl.max(opposite, axis=2), axis=1))


@triton.jit
def _half(x):
    """``x`` (float32) as float16; interpreters warn of what becomes infinite."""
    fits = tl.abs(x) < 65520.0
    beyond = tl.where(x < 0.0, float("-inf"), float("inf"))
    return tl.where(fits, tl.where(fits, x, 0.0).to(tl.float16), beyond).to(tl.float16)


@triton.jit
def _power(largest, EMAX: tl.constexpr):
    """Codes of e8m0: floor(log2 largest) - EMAX; the smallest for 0."""
    small = largest < 1.1754943508222875e-38
    bits = tl.where(small, largest * 16777216.0, largest).to(tl.int32, bitcast=True)
    code = (bits >> 23) - tl.where(small, 24, 0) - EMAX
    return tl.where(largest == 0.0, 0, tl.minimum(tl.maximum(code, 0), 254))


@triton.jit
def _stored(
    value, largest, thresholds_ptr, order_ptr, SCALE: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr,
    FIRST: tl.constexpr, HIGH: tl.constexpr, SPECIAL: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """A scale as it is stored, and the value it then has."""
    if SCALE == "bf16":
        stored = bfloat16_bits(value)
        scale = (stored << 16).to(tl.float32, bitcast=True)
        stored = stored.to(tl.int16)
    elif SCALE == "fp16":
        stored = _half(value)
        scale = stored.to(tl.float32)
    elif SCALE == "fp32":
        stored = value
        scale = value
    elif SCALE == "e8m0":
        code = _power(largest, EMAX)
        scale = numbers(code, thresholds_ptr, _POWERS, 8, 0, 0, 0, 1.0)
        stored = code.to(tl.uint8)
    else:
        code = nearest(value, thresholds_ptr, order_ptr, _FLOATS, 8, MANTISSA, FIRST, 1.0, 0.0, HIGH, -1, 0)
        scale = numbers(code, thresholds_ptr, _FLOATS, 8, 0, MANTISSA, SPECIAL, FACTOR)
        stored = code.to(tl.uint8)
    return stored, scale


@triton.jit
def quantize(
    x_ptr, fixed_ptr, outer_ptr, thresholds_ptr, order_ptr, packed_ptr, scale_ptr, zero_ptr, refused_ptr,
    R, N, K, stride_x, stride_packed, stride_scale,
    BITS: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, FIRST: tl.constexpr, INVERSE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, NAN: tl.constexpr, COUNT: tl.constexpr,
    SCALE: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_FIRST: tl.constexpr, SCALE_HIGH: tl.constexpr,
    SCALE_SPECIAL: tl.constexpr, SCALE_FACTOR: tl.constexpr, EMAX: tl.constexpr, EVEN: tl.constexpr, REACH: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_OUTER: tl.constexpr, IS_FIXED: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One group of each of ROWS rows of ``x`` [R, K]: STEPS blocks of WORDS words of eight, read once where there is one block.

    ``GROUP``: 0, the whole row. ``REACH``: code value of a group's largest magnitude; ``EVEN``: the same where both signs reach
    equally far, and the largest code value with zero points. ``N`` rows share a tensor scale. ``IS_FIXED``: all groups have the
    scale ``fixed``; groups that are not finite have NaN. ``refused``: set where a scale is not finite, or is 0 in float16 for
    values that are not.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < R
    group = tl.program_id(1)
    begin = group * (GROUP // 8)
    at, j = tl.arange(0, WORDS), tl.arange(0, 8)
    rows = packed_ptr + row * stride_packed
    end = K if GROUP == 0 else tl.minimum(K, (group + 1) * GROUP)
    high, low = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    for step in tl.static_range(STEPS):
        column = (begin + step * WORDS + at)[:, None] * 8 + j[None, :]
        mask = row_mask[:, None, None] & (column < end)[None, :, :]
        x = tl.load(x_ptr + row[:, None, None] * stride_x + column[None, :, :], mask=mask, other=0.0).to(tl.float32)
        high, low = _wider(high, low, x)
    if IS_FIXED:
        scale = tl.load(fixed_ptr) + tl.zeros([ROWS], tl.float32)
        finite = tl.maximum(high, low) < 0x7F800000  # bits of infinity: such a group has no codes
        tl.store(scale_ptr + row * stride_scale + group, tl.where(finite, scale, float("nan")), mask=row_mask)
    else:
        high, low = high.to(tl.float32, bitcast=True), low.to(tl.float32, bitcast=True)
        even = tl.full([ROWS], EVEN, tl.float32)
        if ZERO == 0:
            largest = tl.maximum(high.to(tl.int32, bitcast=True), low.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
            value = divided(largest, even)
            if REACH < 0:
                further = divided(tl.where(high > low, high, -low), tl.full([ROWS], REACH, tl.float32))
                value = tl.where(high == low, value, further)
        else:
            largest = high * 0.5 + low * 0.5
            value = divided(high, even) + divided(low, even)
        if HAS_OUTER:
            above = tl.load(outer_ptr + row // N, mask=row_mask, other=0.0)
            above = tl.where(above < float("inf"), above, 1.0)
            value = divided(tl.where(largest < float("inf"), value, 0.0), tl.where(above == 0.0, 1.0, above))
        stored, scale = _stored(
            value, largest, thresholds_ptr, order_ptr, SCALE, EMAX, SCALE_MANTISSA, SCALE_FIRST, SCALE_HIGH, SCALE_SPECIAL,
            SCALE_FACTOR,
        )  # fmt: skip
        tl.store(scale_ptr + row * stride_scale + group, stored, mask=row_mask)
        finite = (tl.abs(scale) < float("inf")) & (largest < float("inf"))
        sound = finite & ((scale != 0.0) | (largest == 0.0)) if SCALE == "fp16" else finite
        tl.store(refused_ptr + tl.zeros([ROWS], tl.int32), tl.full([ROWS], 1, tl.int32), mask=row_mask & (sound == 0))
        scale, low = tl.where(finite, scale, 1.0), tl.where(finite, low, 0.0)  # keeps the arithmetic finite; its scale is NaN
        if HAS_OUTER:
            scale *= above
    if ZERO > 0:
        zero = divided(low, scale)
        if ZERO == 1:
            whole = tl.minimum(tl.maximum(zero, 0.0), HIGH) + 12582912.0
            zero = whole - 12582912.0
            kept = zero.to(tl.uint8)
        elif SCALE == "bf16":
            bits = bfloat16_bits(zero)
            zero = (bits << 16).to(tl.float32, bitcast=True)
            kept = bits.to(tl.int16)
        else:
            kept = _half(zero) if SCALE == "fp16" else zero
            zero = kept.to(tl.float32)
        tl.store(zero_ptr + row * stride_scale + group, kept, mask=row_mask)
    for step in tl.static_range(STEPS):
        word = begin + step * WORDS + at
        if STEPS > 1:
            column = word[:, None] * 8 + j[None, :]
            mask = row_mask[:, None, None] & (column < end)[None, :, :]
            x = tl.load(x_ptr + row[:, None, None] * stride_x + column[None, :, :], mask=mask, other=0.0).to(tl.float32)
        quotient = divided(x, scale[:, None, None])
        if ZERO > 0:
            quotient += zero[:, None, None]
        codes = nearest(
            quotient, thresholds_ptr, order_ptr, KIND, BITS, MANTISSA, FIRST, INVERSE, LOW, HIGH, NAN, COUNT
        )  # fmt: skip
        # columns beyond the last are 0, as torch packs them
        codes = tl.where((word[:, None] * 8 + j[None, :] < end)[None, :, :], codes, 0)
        store_codes(rows, row_mask[:, None] & (word * 8 < end)[None, :], word, codes, K, BITS, ALIGNED)
