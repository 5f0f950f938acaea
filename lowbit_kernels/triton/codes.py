# mypy: disallow-untyped-defs=False
# ruff: noqa: N803, N806 - compile-time constants of a kernel are written in capitals
"""Unpacking of canonical bytes inside Triton kernels; see :mod:`lowbit.packing` for the bytes.

Words of eight codes are loaded once and fields are extracted by shifts, so that no value moves between threads: field ``j`` of
word ``i`` is the code of column ``8 i + j``. Plain Triton without assembly, so that every vendor and the interpreter run the same
code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.decoding import FLOATS, INTEGERS, POWERS

_INTEGERS = tl.constexpr(INTEGERS)
_FLOATS = tl.constexpr(FLOATS)
_POWERS = tl.constexpr(POWERS)


@triton.jit
def load_plane(rows, row_mask, word, K, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr):
    """Words ``word`` [B] of the plane of ``WIDTH`` bits (1, 2 or 4) that starts at the pointers ``rows`` [R]: int32 [R, B], with
    zeros from K on. ``ALIGNED`` and ``EVEN`` as of :func:`load_words`."""
    if ALIGNED:
        mask = row_mask[:, None]
        if not EVEN:
            mask = mask & (word * 8 < K)[None, :]
        if WIDTH == 4:
            words = tl.load(rows.to(tl.pointer_type(tl.int32))[:, None] + word[None, :], mask=mask, other=0)
        elif WIDTH == 2:
            words = tl.load(rows.to(tl.pointer_type(tl.int16))[:, None] + word[None, :], mask=mask, other=0).to(tl.int32)
        else:
            words = tl.load(rows[:, None] + word[None, :], mask=mask, other=0).to(tl.int32)
    else:
        words = tl.zeros([rows.shape[0], word.shape[0]], tl.int32)
        for byte in tl.static_range(WIDTH):
            column = word * WIDTH + byte
            mask = row_mask[:, None] & (column < (K * WIDTH + 7) // 8)[None, :]
            words |= tl.load(rows[:, None] + column[None, :], mask=mask, other=0).to(tl.int32) << (8 * byte)
    return words


@triton.jit
def _plane_bytes(K, WIDTH: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """Bytes of a row's plane. Where blocks of WORDS words are all full it is a multiple of WORDS words, which the compiler cannot
    know and needs for vector copies.
    """
    if EVEN:
        size = tl.multiple_of(K // 8, WORDS) * WIDTH
    else:
        size = (K * WIDTH + 7) // 8
    return size


@triton.jit
def load_words(rows, row_mask, word, K, BITS: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr):
    """Words ``word`` [B], eight codes each, of the packed rows at the pointers ``rows`` [R]: three times int32 [R, B].

    Of up to seven bits these are the planes, the widest first and again in place of those that there are not: a plane of
    width w exists exactly if ``BITS & w``, and the planes before it hold ``BITS & ~(2w - 1)`` bits. Eight bits come as two
    words of four codes. ``ALIGNED``: words start at multiples of their size and K is a multiple of eight. ``EVEN``: none is
    beyond K.
    """
    if BITS == 8:
        if ALIGNED:
            mask = row_mask[:, None]
            if not EVEN:
                mask = mask & (word * 8 < K)[None, :]
            both = tl.load(rows.to(tl.pointer_type(tl.int64))[:, None] + word[None, :], mask=mask, other=0)
            first = both.to(tl.int32)
            second = (both >> 32).to(tl.int32)
        else:
            first = load_plane(rows, row_mask, word * 2, K * 2, 4, False, False)
            second = load_plane(rows, row_mask, word * 2 + 1, K * 2, 4, False, False)
        third = first
    else:
        FIRST: tl.constexpr = 4 if BITS >= 4 else 2 if BITS >= 2 else 1
        first = load_plane(rows, row_mask, word, K, FIRST, ALIGNED, EVEN)
        second = first
        third = first
        plane = rows + _plane_bytes(K, FIRST, word.shape[0], EVEN)
        if BITS == 6 or BITS == 7:
            second = load_plane(plane, row_mask, word, K, 2, ALIGNED, EVEN)
            plane += _plane_bytes(K, 2, word.shape[0], EVEN)
        if BITS == 3 or BITS == 5:
            second = load_plane(plane, row_mask, word, K, 1, ALIGNED, EVEN)
        if BITS == 7:
            third = load_plane(plane, row_mask, word, K, 1, ALIGNED, EVEN)
    return first, second, third


@triton.jit
def _place(words, FROM: tl.constexpr, TO: tl.constexpr, WIDTH: tl.constexpr):
    """``WIDTH`` bits from bit ``FROM`` on, moved to bit ``TO``, other bits 0."""
    if FROM > TO:
        words = words >> (FROM - TO)
    elif FROM < TO:
        words = words << (TO - FROM)
    mask: tl.constexpr = ((1 << WIDTH) - 1) << TO if TO + WIDTH < 32 else -(1 << TO)
    return words & mask


@triton.jit
def field(first, second, third, j: tl.constexpr, BITS: tl.constexpr, AT: tl.constexpr):
    """Codes ``j`` of words as :func:`load_words` returns them, at bit ``AT``: int32."""
    if BITS == 8:
        codes = _place(first if j < 4 else second, j % 4 * 8, AT, 8)
    else:
        FIRST: tl.constexpr = 4 if BITS >= 4 else 2 if BITS >= 2 else 1
        codes = _place(first, j * FIRST, AT, FIRST)
        if BITS == 6 or BITS == 7:
            codes |= _place(second, j * 2, AT + 4, 2)
        if BITS == 3 or BITS == 5:
            codes |= _place(second, j, AT + FIRST, 1)
        if BITS == 7:
            codes |= _place(third, j, AT + 6, 1)
    return codes


@triton.jit
def fp4_pairs(words, j: tl.constexpr, MANTISSA: tl.constexpr, FACTOR: tl.constexpr):
    """Fields ``j`` and ``j + 4`` of words of eight 4-bit floats, through float16: float32, exact."""
    sign = _place(words, 4 * j + 3, 15, 1) | _place(words, 4 * j + 19, 31, 1)
    low: tl.constexpr = 10 - MANTISSA
    both = sign | _place(words, 4 * j, low, 3) | _place(words, 4 * j + 16, low + 16, 3)
    first = both.to(tl.int16).to(tl.float16, bitcast=True)
    second = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    missing: tl.constexpr = FACTOR / 5192296858534827628530496329220096.0  # 2**112: difference of the exponent biases 127 and 15
    return (first * missing).to(tl.float16).to(tl.float32), (second * missing).to(tl.float16).to(tl.float32)


@triton.jit
def split4(x):
    """``x`` [B, 4] as four tensors [B]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def split8(x):
    """``x`` [B, 8] as eight tensors [B]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 4, 2]))
    a, c, e, g = split4(even)
    b, d, f, h = split4(odd)
    return a, b, c, d, e, f, g, h


@triton.jit
def numbers(
    codes, table, KIND: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr, MANTISSA: tl.constexpr, SPECIAL: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """The numbers of int32 ``codes``, float32 and exact, by a :class:`lowbit.decoding.Decoding`."""
    if KIND == _INTEGERS:
        # Codes as the low bits of 2**23 + code: avoids conversion instructions, which have a low rate.
        magic = ((codes ^ FLIP) | 0x4B000000).to(tl.float32, bitcast=True)
        found = magic - (8388608.0 + FLIP)
        if FACTOR != 1.0:
            found *= FACTOR
    elif KIND == _FLOATS:
        magnitude = codes & ((1 << (BITS - 1)) - 1)
        bits = ((codes >> (BITS - 1)) << 31) | (magnitude << (23 - MANTISSA))
        if SPECIAL > 0:
            bits = tl.where(magnitude >= SPECIAL, bits | 0x7F800000, bits)
        found = bits.to(tl.float32, bitcast=True) * FACTOR
    elif KIND == _POWERS:
        bits = tl.where(codes == 0, 0x00400000, tl.where(codes == 255, 0x7FC00000, codes << 23))
        found = bits.to(tl.float32, bitcast=True)
    else:
        found = tl.load(table + codes)
    return found


@triton.jit
def scale_of(stored, table, KIND: tl.constexpr, MANTISSA: tl.constexpr, SPECIAL: tl.constexpr, FACTOR: tl.constexpr):
    """The numbers of stored scales: floats, or bytes of a format's codes (``KIND`` at least 0)."""
    if KIND < 0:
        return stored.to(tl.float32)
    else:
        return numbers(stored.to(tl.int32), table, KIND, 8, 0, MANTISSA, SPECIAL, FACTOR)


@triton.jit
def load_groups(pointers, row_mask, step, K, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """Loads from ``pointers`` [R] for each group that block ``step`` of WORDS words touches: columns [R, 1].

    Broadcasting a column to the threads that hold the words of a group costs less than a value for each word.
    """
    if GROUP == 0:
        found = (tl.load(pointers, mask=row_mask, other=0)[:, None],)
    else:
        EACH: tl.constexpr = GROUP // 8
        TOUCHED: tl.constexpr = 1 if EACH % WORDS == 0 else WORDS // EACH if WORDS % EACH == 0 else (WORDS + EACH - 2) // EACH + 1
        first = step * WORDS // EACH
        found = (tl.load(pointers + first, mask=row_mask, other=0)[:, None],)
        for g in tl.static_range(1, TOUCHED):
            target = row_mask & (tl.full([pointers.shape[0]], 0, tl.int32) + (first + g) * GROUP < K)
            column = tl.load(pointers + first + g, mask=target, other=0)[:, None]
            found = found + (column,)  # type: ignore[assignment] # noqa: RUF005 - Triton has no other way to append to a tuple
    return found


@triton.jit
def per_word(columns, step, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """The columns of :func:`load_groups`, each for the words of its group: [R, WORDS], or [R, 1] where there is one."""
    found = columns[0]
    if GROUP > 0:
        EACH: tl.constexpr = GROUP // 8
        group = (step * WORDS + tl.arange(0, WORDS)) // EACH - step * WORDS // EACH
        for g in tl.static_range(1, len(columns)):
            found = tl.where(group[None, :] == g, columns[g], found)
    return found


@triton.jit
def load_stored(pointers, ramp_ptr, row_mask, step, K, GROUP: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """:func:`load_groups` and :func:`per_word` in one, for ``pointers`` [R] aligned to four bytes, where group or block is a
    multiple of the other.

    Groups are loaded four bytes at a time, the least that cp.async copies. ``ramp_ptr``: 0, 1, 2, ... in memory. Everything
    applied to a weight on its way into a product must start at loads; otherwise the compiler computes it in another layout and
    moves the weight through shared memory. So not even a shift may come from a range.
    """
    DTYPE: tl.constexpr = pointers.dtype.element_ty
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth
    PER: tl.constexpr = 32 // SIZE
    EACH: tl.constexpr = GROUP // 8
    TOUCHED: tl.constexpr = 1 if EACH >= WORDS else WORDS // EACH
    tl.static_assert(EACH % WORDS == 0 or WORDS % EACH == 0)
    first = step * WORDS // EACH
    target = pointers.to(tl.pointer_type(tl.int32)) + first // PER
    words = tl.load(target, mask=row_mask, other=0)[:, None]
    group = tl.arange(0, WORDS if TOUCHED > 1 else 1)[None, :] // EACH
    if PER > 1 or TOUCHED > 1:
        place = tl.load(ramp_ptr + (group if TOUCHED >= PER else first % PER + group))
    for w in tl.static_range(1, TOUCHED // PER):
        mask = row_mask & (tl.full([pointers.shape[0]], 0, tl.int32) + (first + w * PER) * GROUP < K)
        words = tl.where(place // PER == w, tl.load(target + w, mask=mask, other=0)[:, None], words)
    if PER > 1:
        words = words >> (place % PER * SIZE)
    if TOUCHED > 1 and not EVEN:  # values beyond K are undefined
        words = tl.where((first + group) * GROUP < K, words, 0)
    bits = words.to(tl.int8 if SIZE == 8 else tl.int16 if SIZE == 16 else tl.int32)
    return bits.to(DTYPE, bitcast=True)
