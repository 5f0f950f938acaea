"""Block sizes of the kernels: measured on this machine, else shipped for its GPU, else by a rule.

Nothing is measured here; ``lowbit tune`` does that when it is called.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache

import torch

from lowbit.catalog import cached
from lowbit.decoding import FLOATS, INTEGERS, TABLE
from lowbit.scheme import Scheme

from . import tables

__all__ = [
    "Block", "block", "bucket", "candidates", "fitted", "fixed", "shared_bytes", "key", "narrow", "rule",
    "shared_memory", "supports_wide",
]  # fmt: skip

Block = Mapping[str, int]
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # upper bounds of the buckets of M; 0 is the one above them
_PROCESSORS = 132  # multiprocessors, of an H200
_SHARED = 227 * 1024  # bytes of shared memory of a block there
_SLACK = 32 * 1024  # reserve for scales, zero points and layout conversions

_fixed: ContextVar[tuple[str, Block] | None] = ContextVar("lowbit_fixed_block", default=None)


def block(kernel: str, device: torch.device, scheme: Scheme, dtype: torch.dtype, m: int, n: int, k: int) -> Block:
    """The block of ``kernel`` for ``m`` rows of x of ``dtype`` and a weight [n, k]."""
    given = _fixed.get()
    if given is not None and given[0] == kernel:
        return given[1]
    return _chosen(kernel, device, scheme, dtype, m, n, k)


@cached(maxsize=4096)
def _chosen(kernel: str, device: torch.device, scheme: Scheme, dtype: torch.dtype, m: int, n: int, k: int) -> Block:
    if dtype != torch.float32:
        measured = tables.measured(device)
        for name in (key(kernel, scheme, m, n, k), key(kernel, scheme.bits, m, n, k)):
            if (found := measured.get(name)) is not None and tables.is_block(kernel, found):
                return fitted(kernel, found, scheme, dtype, k, shared_memory(device))
    return fitted(kernel, rule(kernel, scheme, dtype, m, n, k), scheme, dtype, k, shared_memory(device))


@contextlib.contextmanager
def fixed(kernel: str, chosen: Block) -> Iterator[None]:
    """Within the block ``kernel`` uses ``chosen`` for every call (in this thread)."""
    token = _fixed.set((kernel, chosen))
    try:
        yield
    finally:
        _fixed.reset(token)


def forget() -> None:
    """Rereads the tables, after something was measured."""
    tables.measured.cache_clear()
    _chosen.cache_clear()


def key(kernel: str, weight: Scheme | int, m: int, n: int, k: int) -> str:
    """Key of a table: scheme or bits of the weight, bucket of M, and the powers of two at or above N and K."""
    of = f"{weight}bits" if isinstance(weight, int) else str(weight)
    return f"{kernel} {of} m{bucket(m)} {_power_above(n)}x{_power_above(k)}"


def bucket(m: int) -> int:
    """The largest M of the bucket of ``m``; 0 for the one above all of them."""
    return next((limit for limit in BUCKETS if m <= limit), 0)


def _power_above(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


# ---- rules -------------------------------------------------------------------------------------------------------


def rule(kernel: str, scheme: Scheme, dtype: torch.dtype, m: int, n: int, k: int) -> Block:
    """What was fast on an H200 for such shapes, where no table has an entry."""
    if kernel == "gemv":
        return _wide(n, k) if supports_wide(scheme, dtype, k) else narrow(n, k)
    return _gemm(m, n, k, dtype) if kernel == "gemm" else _w8a8_gemm(m)


def supports_wide(scheme: Scheme, dtype: torch.dtype, k: int) -> bool:
    """Whether ``gemv_wide`` can be used: 4-bit codes whose groups are whole runs of 16 bytes. Not for float32 x, which is divided
    by powers of two and might lose bits.
    """
    dec = scheme.fmt.decoding
    plain = dec.kind == INTEGERS or (dec.kind == FLOATS and dec.special == 0 and dec.mantissa <= 1)
    group = 0 if scheme.group(k) >= k else scheme.group_size
    whole = scheme.bits == 4 and k % 32 == 0 and (group % 32 == 0 or (group == 16 and scheme.zero_point == "none"))
    return plain and whole and dtype != torch.float32 and scheme.zero_point != "float"


_ROWS_ENOUGH = 1024  # larger weights share a compiled kernel; smaller ones need smaller blocks to occupy all multiprocessors
_ROWS_PLENTY = 8192  # from here on blocks of twice the rows


def _wide(n: int, k: int) -> Block:
    quads = max(k // 32, 1)
    warps = 4 if quads >= 128 else 2 if quads >= 64 else 1
    rows = 8 if n >= _ROWS_PLENTY else 4 if n >= _ROWS_ENOUGH else 1
    return {"ROWS": rows, "QUADS": 32 * warps, "num_warps": warps}


def narrow(n: int, k: int) -> Block:
    """One row of x, one word a thread: any scheme and any K."""
    words = -(-k // 8)
    warps = 4 if words >= 128 else 2 if words >= 64 else 1
    wide = 2 if words >= 64 * warps else 1
    return {"ROWS": 4 if n >= _ROWS_ENOUGH else 1, "WORDS": 32 * warps * wide, "num_warps": warps}


def _gemm(m: int, n: int, k: int, dtype: torch.dtype) -> Block:
    if dtype == torch.float32:  # fp32 products on CUDA cores: a block is limited by registers
        return {"BLOCK_M": 16 if m <= 16 else 32, "BLOCK_N": 32, "WORDS": 16, "num_warps": 4, "STAGES": 1, "SPLIT_K": 1}
    if m <= 16:  # with fewer than 16 rows of x or four warps the compiler does not use the fast products
        block_m, block_n, warps, stages, each = 16, 64, 4, 4, 4
    elif m <= 64:
        block_m, block_n, warps, stages, each = (32 if m <= 32 else 64), 128, 4, 3, 2
        if m > 32 and n >= 8192:  # enough rows of the weight for blocks of half the size, more of which share a multiprocessor
            block_n, stages = 64, 4
    else:  # experts may have any number of rows
        block_m, block_n, warps, stages, each = 128, 128, 8, 4, 1
    tiles = -(-n // block_n) * -(-m // block_m)
    parts = max(1, min(8, each * _PROCESSORS // tiles, k // 512))  # enough blocks for several to share a multiprocessor
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "WORDS": 16, "num_warps": warps, "STAGES": stages, "SPLIT_K": parts}


def _w8a8_gemm(m: int) -> Block:
    if m <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "STAGES": 4}
    if m <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "STAGES": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "STAGES": 3}


# ---- what a block holds ------------------------------------------------------------------------------------------


def shared_bytes(kernel: str, chosen: Block, scheme: Scheme, dtype: torch.dtype, k: int) -> int:
    """Bytes of shared memory of a block of ``gemm`` or ``w8a8_gemm``, as the compiler lays it out: both operands of every stage
    and, with two stages or where K ends within a step, the values of codes that are looked up.
    """
    stages = chosen["STAGES"]
    if kernel == "w8a8_gemm":
        return stages * chosen["BLOCK_K"] * (chosen["BLOCK_M"] + chosen["BLOCK_N"]) + _SLACK
    columns = 8 * chosen["WORDS"]
    codes = columns * chosen["BLOCK_N"] * scheme.bits // 8
    numbers = 0
    if scheme.fmt.decoding.kind == TABLE and (k % columns or stages <= 2):
        numbers = max(stages - 1, 1) * columns * chosen["BLOCK_N"] * 4
    return stages * (columns * chosen["BLOCK_M"] * dtype.itemsize + codes) + numbers + _SLACK


def fitted(kernel: str, chosen: Block, scheme: Scheme, dtype: torch.dtype, k: int, limit: int | None) -> Block:
    """``chosen`` with fewer stages, then smaller tiles, until it fits ``limit`` bytes of shared memory."""
    if limit is None or kernel == "gemv":
        return chosen
    found = dict(chosen)
    while shared_bytes(kernel, found, scheme, dtype, k) > limit:
        if found["STAGES"] > 2:
            found["STAGES"] -= 1
        elif max(found["BLOCK_N"], found["BLOCK_M"]) > 16:
            found[max("BLOCK_N", "BLOCK_M", key=lambda name: found[name])] //= 2
        else:
            break  # the smallest that there is
    return found


@lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int | None:
    """Bytes of shared memory that a block may have on ``device``; None: no limit (the interpreter)."""
    if device.type == "cpu":
        return None
    from triton.runtime import driver

    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


# ---- candidates --------------------------------------------------------------------------------------------------


def candidates(kernel: str, scheme: Scheme, dtype: torch.dtype, m: int, n: int, k: int, limit: int | None = None) -> list[Block]:
    """Blocks to measure, the rule's first, within ``limit`` bytes of shared memory; None: those of an H200."""
    limit = _SHARED if limit is None else limit
    first = dict(fitted(kernel, rule(kernel, scheme, dtype, m, n, k), scheme, dtype, k, limit))
    if kernel == "gemv":
        others = _gemv_candidates(scheme, dtype, n, k)
    elif kernel == "gemm":
        others = _gemm_candidates(m, n, k)
    else:
        others = _w8a8_gemm_candidates(m)
    fit = (other for other in others if kernel == "gemv" or shared_bytes(kernel, other, scheme, dtype, k) <= limit)
    return [first, *(other for other in fit if other != first)]


def _gemv_candidates(scheme: Scheme, dtype: torch.dtype, n: int, k: int) -> Iterator[dict[str, int]]:
    rows = [size for size in (4, 8, 2, 1, 16) if size <= max(n, 1)]
    for name, each in (("QUADS", 32), ("WORDS", 8)):
        if name == "QUADS" and not supports_wide(scheme, dtype, k):
            continue
        limit = max(32, _power_above(-(-k // each)))
        for warps, times, size in itertools.product((4, 2, 8, 1), (1, 2), rows):
            if 32 * warps * times <= limit:
                yield {"ROWS": size, name: 32 * warps * times, "num_warps": warps}


def _gemm_candidates(m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    block_m = min(128, max(16, _power_above(m)))
    sizes = ((64, 4), (128, 4), (32, 2), (64, 2)) if block_m == 16 else ((128, 4), (64, 4), (128, 8), (256, 8))
    seen = set()
    for each, stages, (block_n, warps) in itertools.product((4, 2, 1, 8), (3, 4, 6, 2), sizes):
        tiles = -(-n // block_n) * -(-m // block_m)
        parts = max(1, min(16, each * _PROCESSORS // tiles, k // 512))
        if (found := (block_n, warps, stages, parts)) not in seen:
            seen.add(found)
            one = {"BLOCK_M": block_m, "BLOCK_N": block_n, "WORDS": 16, "num_warps": warps, "STAGES": stages, "SPLIT_K": parts}
            yield one
            if warps == 8 and block_m * block_n <= 64 * 128:  # two such blocks share a multiprocessor if their registers are
                # limited
                yield {**one, "REGISTERS": 128}


def _w8a8_gemm_candidates(m: int) -> Iterator[dict[str, int]]:
    block_m = min(128, max(16, _power_above(m)))
    for (block_n, warps), block_k, stages in itertools.product(((32, 4), (64, 4), (128, 4), (128, 8)), (128, 256), (3, 4)):
        if block_m * block_n >= 64 * 32 * warps or block_n <= 64:
            yield {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "STAGES": stages}
