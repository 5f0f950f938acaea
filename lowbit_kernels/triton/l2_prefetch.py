# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""What a kernel asks of the memory before the one ahead of it has ended: its weight does not depend on that one."""

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
    """Ask for ``words`` words of eight codes from word ``first`` on, of the packed rows at the pointers ``rows`` [R], to be
    brought into the cache that all processors share. Rows lie at multiples of 16 bytes; ``words``, ``first`` and K // 8 are
    multiples of 16. For sm_90 and later."""
    plane = rows
    for power in tl.static_range(4):
        if BITS & (8 >> power):  # there is a plane of as many bits
            size = tl.where(row_mask, words * (8 >> power), 0)
            target = (plane + first * (8 >> power)).to(tl.int64)
            tl.inline_asm_elementwise(_PREFETCH_PTX, "=r,l,r", [target, size], dtype=tl.int32, is_pure=False, pack=1)
            plane += K // 8 * (8 >> power)
