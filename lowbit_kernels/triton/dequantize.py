# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""Dequantizes a packed weight of any format, or some of its rows.

   packed [N, bytes] --load_words, field--> codes --numbers, - zero, * scale--> f32 --store--> out [COUNT, K]

Contract: exact, rounded once to the dtype of out. Limit: the bytes of out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import field, load_groups, load_words, numbers, per_word, scale_of


@triton.jit
def _interleave_columns(a, b, c, d):
    """Four tensors [R, B] as the columns 4 i, 4 i + 1, ... of [R, 4 B]."""
    both = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(both, [a.shape[0], a.shape[1] * 4])


@triton.jit
def dequantize(
    packed_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, scale_table_ptr, index_ptr, out_ptr,
    COUNT, N, K, stride_packed, stride_scale, stride_zero,
    BITS: tl.constexpr, KIND: tl.constexpr, FLIP: tl.constexpr, MANTISSA: tl.constexpr, SPECIAL: tl.constexpr,
    FACTOR: tl.constexpr,
    SCALE_KIND: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_SPECIAL: tl.constexpr, SCALE_FACTOR: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_INDEX: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """ROWS rows and WORDS words of ``out`` [COUNT, K]: rows of the weight, or those in ``index``. ``N`` rows share a tensor
    scale.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = i < COUNT
    row = tl.load(index_ptr + i, mask=mask, other=0).to(tl.int64) if HAS_INDEX else i
    step = tl.program_id(1)
    word = step * WORDS + tl.arange(0, WORDS)
    first, second, third = load_words(packed_ptr + row * stride_packed, mask, word, K, BITS, ALIGNED, EVEN)
    stored = per_word(load_groups(scale_ptr + row * stride_scale, mask, step, K, GROUP, WORDS), step, GROUP, WORDS)
    scale = scale_of(stored, scale_table_ptr, SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR)
    if HAS_OUTER:
        scale *= tl.load(outer_ptr + row // N, mask=mask, other=0.0)[:, None]
    if ZERO > 0:
        zero = per_word(load_groups(zero_ptr + row * stride_zero, mask, step, K, GROUP, WORDS), step, GROUP, WORDS).to(tl.float32)
    for half in tl.static_range(2):
        for j in tl.static_range(4):
            codes = field(first, second, third, half * 4 + j, BITS, 0)
            found = numbers(codes, table_ptr, KIND, BITS, FLIP, MANTISSA, SPECIAL, FACTOR)
            if ZERO > 0:
                found -= zero
            found = (found * scale).to(out_ptr.dtype.element_ty)
            if j == 0:
                a = found
            elif j == 1:
                b = found
            elif j == 2:
                c = found
            else:
                d = found
        if half == 0:
            e = _interleave_columns(a, b, c, d)
    block = tl.join(tl.reshape(e, [ROWS, WORDS, 4]), tl.reshape(_interleave_columns(a, b, c, d), [ROWS, WORDS, 4]))
    block = tl.reshape(tl.permute(block, [0, 1, 3, 2]), [ROWS, WORDS * 8])
    column = step * WORDS * 8 + tl.arange(0, WORDS * 8)
    tl.store(out_ptr + i[:, None] * K + column[None, :], block, mask=mask[:, None] & (column < K)[None, :])
