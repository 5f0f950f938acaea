# mypy: disallow-untyped-defs=False
# ruff: noqa: N803, N806 - compile-time constants of a kernel are written in capitals
"""GEMV of one row of x and a packed weight of any format, in float32.

   packed [ROWS, bytes] --load_words, field--> codes --values - zero, f32--+--fma--> part of a group --* scale--> total [ROWS]
   x [K], every eighth column ---------------------------------------------+         y [ROWS] <--epilogue, sum over threads--+

Contract: exact: fp32 sums of the exact weights, rounded once. Limit: the bytes of the weight.
Reached (evals/results/gemv_h200_triton.json, 8192 x 8192, bfloat16, one H200): int8 19.5 us, 0.74 of the time to read its bytes
and 1.7 times as fast as F.linear; fp8 17.7 us, 0.82 and 1.9 times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import _FLOATS, _INTEGERS, field, fp4_pairs, load_words, numbers, scale_of, split8
from .epilogue import store_output


@triton.jit
def store_sums(
    y, scale_ptr, outer_ptr, bias_ptr, scale_table_ptr, y_ptr, n, n_mask, stride_scale,
    SCALE_KIND: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_SPECIAL: tl.constexpr, SCALE_FACTOR: tl.constexpr,
    GROUP: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Stores rows ``n`` of ``y``: sums times the row's scale, where groups have none, and the tensor scale, then the epilogue."""
    if GROUP == 0:
        stored = tl.load(scale_ptr + n.to(tl.int64) * stride_scale, mask=n_mask, other=0)
        y *= scale_of(stored, scale_table_ptr, SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR)
    if HAS_OUTER:
        y *= tl.load(outer_ptr)
    store_output(y, bias_ptr + n, n_mask, y_ptr + n, n_mask, HAS_BIAS, EPILOGUE)


@triton.jit
def _four_floats(words, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASM, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["opaque"])
def gemv(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, table_ptr, scale_table_ptr, y_ptr,
    N, K, opaque, stride_x, stride_packed, stride_scale, stride_zero,
    BITS: tl.constexpr, KIND: tl.constexpr, FLIP: tl.constexpr, MANTISSA: tl.constexpr,
    SPECIAL: tl.constexpr, FACTOR: tl.constexpr,
    SCALE_KIND: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_SPECIAL: tl.constexpr, SCALE_FACTOR: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """ROWS elements of ``y``, WORDS words of each row at a time; each field is multiplied by every eighth column of x.

    ``GROUP``: 0 where the whole row has one scale, else a multiple of 8. ``ZERO``: 0 none, 1 integers, 2 floats. ``ASM``: see
    :func:`.assembly.bytes_as_floats`.
    """
    # Integers are extracted at bit 4, where one instruction masks a field and makes it the low bits of 2**23 + 16 code.
    AT: tl.constexpr = 4 if BITS < 8 else 0
    UNIT: tl.constexpr = FACTOR / (1 << AT)
    PAIRS: tl.constexpr = KIND == _FLOATS and BITS == 4 and SPECIAL == 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n_mask = n < N
    row = n.to(tl.int64)
    rows = packed_ptr + row * stride_packed
    at = tl.arange(0, WORDS)
    word = at + opaque  # adds a zero unknown to the compiler, which keeps each thread at one word
    column = tl.arange(0, 8 * WORDS)
    total = tl.zeros([ROWS, WORDS], tl.float32)
    a, b, c = load_words(rows, n_mask, word, K, BITS, ALIGNED, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in range(0, K, 8 * WORDS):
        here = first // 8 + word
        if first > 0:
            a, b, c = load_words(rows, n_mask, here, K, BITS, ALIGNED, EVEN)
        mask = n_mask[:, None]
        if not EVEN:
            mask = mask & (here * 8 < K)[None, :]
        if EVEN:
            x = tl.load(x_ptr + (first + column) * stride_x)
        else:
            x = tl.load(x_ptr + (first + column) * stride_x, mask=first + column < K, other=0.0)
        xs = split8(tl.reshape(x.to(tl.float32), [WORDS, 8]))
        if ZERO != 1:
            zero = 8388608.0 + (FLIP << AT)
        if GROUP > 0:
            # not true, but makes the compiler lay out threads along the row
            group = tl.max_contiguous(here // (GROUP // 8), WORDS)[None, :]
            stored = tl.load(scale_ptr + row[:, None] * stride_scale + group, mask=mask, other=0)
        if ZERO > 0:
            if GROUP > 0:
                stored_zero = tl.load(zero_ptr + row[:, None] * stride_zero + group, mask=mask, other=0)
            else:
                stored_zero = tl.load(zero_ptr + row * stride_zero, mask=n_mask, other=0)[:, None]
            if ZERO == 1:
                # 2**23 + zero, like the codes
                zero = ((stored_zero.to(tl.int32) << AT) | 0x4B000000).to(tl.float32, bitcast=True)
            else:
                shift = stored_zero.to(tl.float32) * (1 << AT)
        if PAIRS:
            part = tl.zeros([ROWS, WORDS], tl.float32)
            for j in tl.static_range(4):
                low, high = fp4_pairs(a, j, MANTISSA, FACTOR)
                part += low * xs[j][None, :]
                part += high * xs[j + 4][None, :]
        else:
            if BITS == 8 and ASM != "":
                qs = _four_floats(a, ASM) + _four_floats(b, ASM)
            for j in tl.static_range(8):
                if BITS == 8 and ASM != "":
                    q = qs[j]
                elif ZERO == 1:
                    q = (field(a, b, c, j, BITS, AT) | 0x4B000000).to(tl.float32, bitcast=True) - zero
                elif KIND == _INTEGERS:
                    q = ((field(a, b, c, j, BITS, AT) ^ (FLIP << AT)) | 0x4B000000).to(tl.float32, bitcast=True) - zero
                else:
                    q = numbers(field(a, b, c, j, BITS, 0), table_ptr, KIND, BITS, FLIP, MANTISSA, SPECIAL, FACTOR)
                if ZERO == 2:
                    q -= shift
                if j == 0:
                    part = q * xs[j][None, :]
                else:
                    part += q * xs[j][None, :]
            if KIND == _INTEGERS and UNIT != 1.0:
                part *= UNIT
        if GROUP > 0:
            part *= scale_of(stored, scale_table_ptr, SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR)
        total += part
    store_sums(
        tl.sum(total, axis=1), scale_ptr, outer_ptr, bias_ptr, scale_table_ptr, y_ptr, n, n_mask, stride_scale,
        SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR, GROUP, HAS_OUTER, HAS_BIAS, EPILOGUE,
    )  # fmt: skip
