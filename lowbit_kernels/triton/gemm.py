# mypy: disallow-untyped-defs=False
# ruff: noqa: N803, N806 - compile-time constants of a kernel are written in capitals
"""GEMM of a packed weight of any format on the tensor cores, sums in float32.

   packed [N, bytes] --load_words, field--> codes --values in the dtype of x, in registers--> W tile [BLOCK_N, 8 WORDS] -+
   x [M, K] --interleave: every eighth column side by side------------------> x.T tile [8 WORDS, BLOCK_M] ---------------+--dot-->
   y [M, N] <--epilogue, sum of SPLIT_K parts-- total [BLOCK_N, BLOCK_M] f32 <--* group scale (SCALE_MODE 0)-- f32 sums

Contract: exact (SCALE_MODE 0 and 2 in float32) or weights rounded once (SCALE_MODE 1).
Limit: the bytes of the weight for few rows of x, the tensor cores for many.
Reached (evals/results/gemv_h200_triton.json, 8192 x 8192, bfloat16, one H200): int3 25.5 us at M = 1, 0.23 of the time to read
its bytes and 1.3 times as fast as F.linear.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import _INTEGERS, field, load_groups, load_stored, load_words, numbers, per_word, scale_of
from .epilogue import store_output
from .float_bits import as_float_bits, words_as_floats
from .l2_prefetch import prefetch_l2


@triton.jit
def interleave_x(
    x_ptr, interleaved_ptr, K, WORDS_ALL, stride_xm, stride_xk, PDL: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x [M, K] as [M, 8 WORDS_ALL], zero-padded, in pieces of 8 WORDS columns; within each, every eighth column is contiguous.

    A step of :func:`gemm` multiplies one piece, so it copies long runs of a row.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, 8)
    column = word[:, None] * 8 + j[None, :]
    x = tl.load(x_ptr + m * stride_xm + column.to(tl.int64) * stride_xk, mask=column < K, other=0.0)
    target = (word // WORDS * (8 * WORDS) + word % WORDS)[:, None] + j[None, :] * WORDS
    tl.store(interleaved_ptr + m * 8 * WORDS_ALL + target, x, mask=(word < WORDS_ALL)[:, None])


@triton.jit
def _concat_fields(fields):
    """Eight tensors [N, W] as one, [N, 8 W]. In this order no value leaves its thread."""
    even = tl.join(tl.join(fields[0], fields[4]), tl.join(fields[2], fields[6]))
    odd = tl.join(tl.join(fields[1], fields[5]), tl.join(fields[3], fields[7]))
    return tl.reshape(tl.permute(tl.join(even, odd), [0, 2, 3, 4, 1]), [fields[0].shape[0], 8 * fields[0].shape[1]])


@triton.jit(do_not_specialize=["M", "M_ALL"])
def gemm(
    interleaved_ptr, packed_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, table_ptr, scale_table_ptr, ramp_ptr, y_ptr,
    M, M_ALL, N, K, WORDS_ALL, stride_packed, stride_scale, stride_zero,
    BITS: tl.constexpr, KIND: tl.constexpr, FLIP: tl.constexpr, MANTISSA: tl.constexpr, SPECIAL: tl.constexpr,
    FACTOR: tl.constexpr,
    SCALE_KIND: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_SPECIAL: tl.constexpr, SCALE_FACTOR: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
    SCALE_MODE: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_M] of ``y.T = W @ x.T``. The grid's second axis splits K, each part with its own float32 ``y``;
    the third is the expert, each with M rows of x.

    ``SCALE_MODE``: 0, exact values are multiplied and the scale applied to the group's sum (``GROUP`` 0 or a multiple of 8
    WORDS); 1, each weight is value times scale, rounded once to the dtype of x; 2, the same in float32. ``PREFETCH``: steps
    whose codes are prefetched before x is ready, see :func:`.l2_prefetch.prefetch_l2`. The weight is the left operand, so that
    it can stay in registers; each field of a word is multiplied by every eighth column of x.
    """
    DTYPE: tl.constexpr = interleaved_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 == DTYPE or SCALE_MODE == 2
    # 128 + code needs one bit more than bfloat16 has
    BYTES: tl.constexpr = BITS == 8 and KIND == _INTEGERS and tl.bfloat16 == DTYPE
    IN_PAIRS: tl.constexpr = ASM != "" and not WIDE
    MAGIC: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
    MAGIC_FLIPPED: tl.constexpr = (1024.0 if tl.float16 == DTYPE else 128.0) + FLIP
    # 2**112: difference of the exponent biases 127 (bfloat16) and 15 (float16)
    MISSING: tl.constexpr = FACTOR / 5192296858534827628530496329220096.0 if tl.float16 == DTYPE else FACTOR
    # Scales of weights come by asynchronous copies like the weight; scales of sums are loaded a step ahead.
    COPIED: tl.constexpr = WHOLE and GROUP > 0 and (GROUP % (8 * WORDS) == 0 or 8 * WORDS % GROUP == 0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask, m_mask = n < N, m < M
    expert = tl.program_id(2).to(tl.int64)
    row, wide_m = expert * N + n, expert * M + m  # large vocabularies and long batches exceed 2**31 elements
    rows = packed_ptr + row * stride_packed
    at = tl.arange(0, WORDS)
    steps = tl.cdiv(tl.cdiv(K, 8 * WORDS), tl.num_programs(1))
    begin = tl.program_id(1) * steps
    end = tl.minimum(begin + steps, tl.cdiv(K, 8 * WORDS))
    columns = interleaved_ptr + wide_m * 8 * WORDS_ALL
    across = tl.arange(0, 8 * WORDS)
    if PREFETCH > 0:
        prefetch_l2(rows, n_mask, begin * WORDS, tl.minimum(end - begin, PREFETCH) * WORDS, K, BITS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scales, zeros = scale_ptr + row * stride_scale, zero_ptr + row * stride_zero
    if not (COPIED and SCALE_MODE > 0):
        next_scale = load_groups(scales, n_mask, begin, K, GROUP, WORDS)
    if ZERO > 0 and not COPIED:
        next_zero = load_groups(zeros, n_mask, begin, K, GROUP, WORDS)
    for step in tl.range(begin, end, num_stages=STAGES):
        word = step * WORDS + at
        a, b, c = load_words(rows, n_mask, word, K, BITS, ALIGNED, EVEN)
        following = tl.minimum(step + 1, end - 1)
        if COPIED and SCALE_MODE > 0:
            stored = load_stored(scales, ramp_ptr, n_mask, step, K, GROUP, WORDS, EVEN)
        else:
            stored = per_word(next_scale, step, GROUP, WORDS)
            if GROUP > 0:
                next_scale = load_groups(scales, n_mask, following, K, GROUP, WORDS)
        scale = scale_of(stored, scale_table_ptr, SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR)
        if ZERO > 0 and COPIED:
            zero = load_stored(zeros, ramp_ptr, n_mask, step, K, GROUP, WORDS, EVEN)
        elif ZERO > 0:
            zero = per_word(next_zero, step, GROUP, WORDS)
            if GROUP > 0:
                next_zero = load_groups(zeros, n_mask, following, K, GROUP, WORDS)
        if IN_PAIRS:
            packed_floats = words_as_floats(a, b, c, BITS, ASM)
        fields = ()
        for j in tl.static_range(8):
            if WIDE:
                q = numbers(field(a, b, c, j, BITS, 0), table_ptr, KIND, BITS, FLIP, MANTISSA, SPECIAL, FACTOR)
                if ZERO > 0:
                    q -= zero.to(tl.float32)
            elif BYTES and IN_PAIRS:
                q = packed_floats[j].to(DTYPE, bitcast=True)
            elif BYTES:
                q = numbers(field(a, b, c, j, BITS, 0), table_ptr, KIND, BITS, FLIP, MANTISSA, SPECIAL, 1.0)
                if ZERO == 1:
                    q -= zero.to(tl.float32)
            else:
                if IN_PAIRS:
                    bits = packed_floats[j]
                else:
                    bits = as_float_bits(field(a, b, c, j, BITS, 0), DTYPE, KIND, BITS, FLIP, MANTISSA, SPECIAL)
                q = bits.to(DTYPE, bitcast=True)
                if KIND == _INTEGERS:  # 128 + code, or 1024 + code
                    q -= (zero.to(tl.int16) | MAGIC).to(DTYPE, bitcast=True) if ZERO == 1 else MAGIC_FLIPPED
                else:
                    q *= MISSING
            if SCALE_MODE == 1:
                q *= scale.to(DTYPE)
            elif SCALE_MODE == 2:
                q *= scale
            fields = fields + (q.to(DTYPE),)  # type: ignore[assignment] # noqa: RUF005
        # one dot a step, so that the tensor cores are waited for once
        x = tl.load(columns[None, :] + (step * (8 * WORDS) + across)[:, None], mask=m_mask[None, :], other=0.0)
        part = tl.dot(_concat_fields(fields), x, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), input_precision="ieee")
        if SCALE_MODE == 0 and GROUP > 0:
            total += part * scale
        else:  # a plain sum would become an accumulator of the dot, which is waited for piece by piece
            total = tl.fma(part, tl.full([BLOCK_N, BLOCK_M], 1.0, tl.float32), total)
    if PDL:  # not earlier: waiting blocks of the next kernel would occupy this one's place
        tl.extra.cuda.gdc_launch_dependents()
    if not WIDE and KIND == _INTEGERS and FACTOR != 1.0:
        total *= FACTOR
    if SCALE_MODE == 0 and GROUP == 0:
        total *= scale_of(next_scale[0], scale_table_ptr, SCALE_KIND, SCALE_MANTISSA, SCALE_SPECIAL, SCALE_FACTOR)
    if HAS_OUTER:
        total *= tl.load(outer_ptr + expert)
    y = y_ptr + (tl.program_id(1) * M_ALL.to(tl.int64) + wide_m)[None, :] * N + n[:, None]
    mask = n_mask[:, None] & m_mask[None, :]
    store_output(total, (bias_ptr + row)[:, None], n_mask[:, None], y, mask, HAS_BIAS, EPILOGUE)


@triton.jit(do_not_specialize=["SIZE", "M"])
def splitk_reduce(
    parts_ptr, bias_ptr, y_ptr, SIZE, M, N,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [experts, M, N], SIZE elements, as the sum of SPLIT_K parts in order, then the epilogue with bias [experts, N]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(parts_ptr + part * SIZE.to(tl.int64) + at, mask=mask, other=0.0)
    bias = bias_ptr + at // (M.to(tl.int64) * N) * N + at % N
    store_output(total, bias, mask, y_ptr + at, mask, HAS_BIAS, EPILOGUE)
