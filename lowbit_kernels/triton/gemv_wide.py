# mypy: disallow-untyped-defs=False
# ruff: noqa: N803, N806 - compile-time constants of a kernel are written in capitals
"""GEMV of one row of x and 4-bit codes, sixteen bytes a thread, in float32.

   packed [ROWS, 16 bytes a thread] --split4--> words --field in place--> 2**23 + 2**(4 j) code --fma--> total [ROWS] --> y
   x [K] / 2**(4 j) -------------------------------------------------------------------------------+

Contract: exact: fp32 sums of the exact weights, rounded once. Limit: the bytes of the weight.
Reached (evals/results/gemv_h200_triton.json as triton_gemv, 8192 x 8192, bfloat16, one H200): int4 14.7 us, 0.52 of the time to
read its bytes and 2.3 times as fast as F.linear; mxfp4 15.6 us, 0.50 and 2.2 times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import _INTEGERS, scale_of, split8
from .gemv import store_sums


@triton.jit
def split4(words):
    """``words`` [R, 4 B] as four tensors [R, B]: every fourth column."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _place(j: tl.constexpr):
    """Place of field ``j`` when it is used: fields 0 to 4 in place, the others after a shift by 12 bits."""
    return 4 * j if j < 5 else 4 * j - 12


@triton.jit
def _integers(part, words, xs, zeros, magic):
    """``part`` plus (codes of ``words`` minus zero points) times ``xs``.

    A field in place is the low bits, from 4 j on, of 2**23 + 2**(4 j) code; ``xs`` are divided by 2**(4 j).
    """
    shifted = words >> 12
    for j in tl.static_range(8):
        field = (words if j < 5 else shifted) & (15 << _place(j))
        x = xs[j] * (1.0 / (1 << _place(j)))
        part += ((field | magic).to(tl.float32, bitcast=True) - zeros[j if j < 5 else j - 3]) * x[None, :]
    return part


_BOTH_HALVES = tl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }")


@triton.jit
def _split_f16x2(both, ON_CUDA: tl.constexpr):
    """The low and the high float16 of each word, as float32."""
    if ON_CUDA:  # otherwise the compiler shifts the high one before converting it
        low, high = tl.inline_asm_elementwise(
            _BOTH_HALVES, "=f,=f,r", [both], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        low = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _floats(part, words, xs, MANTISSA: tl.constexpr, ON_CUDA: tl.constexpr):
    """``part`` plus the floats of ``words`` times ``xs``, two at a time through float16, smaller by 2**14."""
    low: tl.constexpr = 10 - MANTISSA
    for j in tl.static_range(4):
        sign = words if j == 3 else words << (12 - 4 * j)
        size = words << (low - 4 * j) if low >= 4 * j else words >> (4 * j - low)
        both = (sign & -2147450880) | (size & (0x00070007 << low))  # -2147450880: 0x80008000
        first, second = _split_f16x2(both, ON_CUDA)
        part += first * xs[j][None, :]
        part += second * xs[j + 4][None, :]
    return part


@triton.jit(do_not_specialize=["magic"])
def gemv_wide(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, scale_table_ptr, y_ptr,
    N, K, magic, stride_packed, stride_scale, stride_zero,
    KIND: tl.constexpr, FLIP: tl.constexpr, MANTISSA: tl.constexpr, FACTOR: tl.constexpr,
    SCALE_KIND: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_SPECIAL: tl.constexpr, SCALE_FACTOR: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
    FULL: tl.constexpr, PDL: tl.constexpr, ON_CUDA: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """ROWS elements of ``y``, QUADS times four words of each row at a time. K, and GROUP unless it is 0 (one scale a row) or 16
    (without zero points), are multiples of 32; rows are aligned to 16 bytes.

    ``FULL``: K fills a block. The last block then ends with the row and multiplies by zeros where it overlaps the one before: no
    load of the weight is masked along K, and all such K share a kernel.
    """
    NOTHING: tl.constexpr = None if FULL else 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n_mask = n < N
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows beyond the last repeat it, so that no load is masked
    rows = (packed_ptr + row * stride_packed).to(tl.pointer_type(tl.int32))
    at, each = tl.arange(0, QUADS), tl.arange(0, 4 * QUADS)
    nothing = magic - 0x4B000000
    column = tl.arange(0, 8)
    total = tl.zeros([ROWS, QUADS], tl.float32)
    quads = K // 32
    for begin in range(0, quads, QUADS):
        first = tl.minimum(begin, quads - QUADS) if FULL else begin
        quad = first + at
        word = first * 4 + each
        mask = None if FULL else (quad < quads)[None, :]
        mask_words = None if FULL else (word < quads * 4)[None, :]
        words = split4(tl.load(rows[:, None] + word[None, :], mask=mask_words, other=NOTHING))
        if GROUP > 0:
            group = (quad // (GROUP // 32) if GROUP >= 32 else quad * 2) + nothing
            group = tl.max_contiguous(group, QUADS)[None, :]  # not true, but makes the compiler lay out threads along the row
            stored = tl.load(scale_ptr + row[:, None] * stride_scale + group, mask=mask, other=NOTHING)
            if GROUP == 16:
                stored_second = tl.load(scale_ptr + row[:, None] * stride_scale + group + 1, mask=mask, other=NOTHING)
        if ZERO == 1:
            if GROUP > 0:
                zero = tl.load(zero_ptr + row[:, None] * stride_zero + group, mask=mask, other=NOTHING).to(tl.int32)
            else:
                zero = tl.load(zero_ptr + row * stride_zero).to(tl.int32)[:, None]
        else:
            zero = tl.full([1, 1], FLIP, tl.int32)
        zeros = ((zero + magic).to(tl.float32, bitcast=True),)
        for j in tl.static_range(1, 5):
            zeros = zeros + (((zero << (4 * j)) + magic).to(tl.float32, bitcast=True),)  # type: ignore[assignment] # noqa: RUF005
        if PDL:
            tl.extra.cuda.gdc_wait()  # in the first iteration only; later there is nothing to wait for
        part = tl.zeros([ROWS, QUADS], tl.float32)
        for t in tl.static_range(4):
            there_x = x_ptr + (quad * 32 + t * 8)[:, None] + column[None, :]
            x = tl.load(there_x, mask=(quad >= begin if FULL else quad < quads)[:, None], other=0.0)
            xs = split8(x.to(tl.float32))
            if KIND == _INTEGERS:
                part = _integers(part, words[t] ^ -2004318072 if FLIP == 8 else words[t], xs, zeros, magic)
            else:
                part = _floats(part, words[t], xs, MANTISSA, ON_CUDA)
            if GROUP == 16 and t == 1:
                total += part * scale_of(stored, scale_table_ptr, SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR)
                part = tl.zeros([ROWS, QUADS], tl.float32)
                stored = stored_second
        if GROUP > 0:
            part *= scale_of(stored, scale_table_ptr, SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR)
        total += part
    y = tl.sum(total, axis=1)
    if KIND == _INTEGERS:
        y *= FACTOR
    else:
        y *= FACTOR / 5192296858534827628530496329220096.0  # 2**112: difference of the exponent biases 127 and 15
    store_sums(
        y, scale_ptr, outer_ptr, bias_ptr, scale_table_ptr, y_ptr, n, n_mask, stride_scale,
        SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR, GROUP, HAS_OUTER, HAS_BIAS, EPILOGUE,
    )  # fmt: skip
