# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""Prefetches of the weight into L2 before the kernel ahead has ended, since the weight does not depend on it."""

from __future__ import annotations

import triton
import triton.language as tl

_PREFETCH_PTX = tl.constexpr(
    """{
.reg .pred p;
setp.gt.s32 p, $2, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, 0;
}"""
)


@triton.jit
def prefetch_l2(rows, row_mask, first, words, K, BITS: tl.constexpr):
    """Prefetches ``words`` words of eight codes from word ``first`` on, of the packed rows at the pointers ``rows`` [R], into L2.
    Rows are aligned to 16 bytes; ``words``, ``first`` and K // 8 are multiples of 16. For sm_90 and later.
    """
    plane = rows
    for power in tl.static_range(4):
        if BITS & (8 >> power):  # a plane of that width exists
            size = tl.where(row_mask, words * (8 >> power), 0)
            target = (plane + first * (8 >> power)).to(tl.int64)
            tl.inline_asm_elementwise(_PREFETCH_PTX, "=r,l,r", [target, size], dtype=tl.int32, is_pure=False, pack=1)
            plane += K // 8 * (8 >> power)
