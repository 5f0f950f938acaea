"""The physical limit: how fast this machine reads bytes and does nothing else with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from .cold_cache import MIN_GRAPH_CALLS, Times, copies_of, timed

__all__ = ["ReadLimits"]

# (blocks for each multiprocessor, 0: as many as there are pieces; bytes of a piece; warps of a block) of the readers that are
# tried. Those without a loop are the quickest to start, those with one leave room for the next kernel's blocks.
_PLANS = ((0, 4096, 4), (0, 8192, 4), (0, 16384, 8), (1, 32768, 8), (2, 16384, 8), (3, 32768, 8), (8, 16384, 8))


class ReadLimits:
    """Microseconds to read a number of bytes, ``cold`` or the same ones again and again, in each mode of a sweep: the best of
    several readers, each measured once, or for :meth:`measured_now` again."""

    def __init__(self, device: torch.device, repeats: int = 9, cold: bool = True) -> None:
        self._device, self._repeats, self._cold = device, repeats, cold
        self._cache: dict[int, Times] = {}
        self._data = torch.empty(0, dtype=torch.uint8, device=device)

    def __call__(self, size: int) -> Times:
        if size not in self._cache:
            self._cache[size] = self.measured_now(size, self._repeats)
        return self._cache[size]

    def measured_now(self, size: int, repeats: int) -> Times:
        """Measured anew: for memory that others use too, which is another one a second later."""
        found = [self._timed(read, size, repeats) for read in _readers(self._device)]
        pdl = {times.pdl for times in found}.pop()
        return Times(min(t.us for t in found), min(t.no_pdl_us for t in found), pdl)

    def _timed(self, reader: tuple[int, Callable[[Tensor], Tensor]], size: int, repeats: int) -> Times:
        granule, read = reader
        padded = -(-size // granule) * granule
        copies = self._copies(padded)
        if self._data.numel() < copies * padded:
            self._data = torch.empty(0, dtype=torch.uint8, device=self._device)  # before more is asked for
            self._data = torch.randint(0, 255, (copies * padded,), dtype=torch.uint8, device=self._device)
        pieces = self._data[: copies * padded].view(copies, padded)
        calls = [lambda _, piece=piece: read(piece) for piece in pieces]
        times = timed(calls, torch.zeros(1, device=self._device), repeats=repeats)
        return Times(times.us * size / padded, times.no_pdl_us * size / padded, times.pdl)

    def _copies(self, size: int) -> int:
        """On a GPU as many as a sweep has calls: readers wait for nothing, so that several run at once, and two that read the
        same bytes would share them in the cache."""
        cold = copies_of(size, self._device, self._cold)
        if self._device.type != "cuda" or not self._cold:
            return cold
        free = torch.cuda.mem_get_info(self._device)[0] + self._data.numel()
        return max(cold, min(MIN_GRAPH_CALLS, free // 2 // size))


def _readers(device: torch.device) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """(bytes that it takes at a time, a function that reads every byte of a uint8 tensor of a multiple of them)."""
    if device.type != "cuda":
        yield 64, _sum
        return
    for plan in _PLANS:
        yield plan[1], _triton_reader(device, *plan)


def _sum(data: Tensor) -> Tensor:
    # 64-bit integers: one vector addition for each 64 bytes, which costs nothing beside the load.
    return data.view(torch.int64).sum()


@lru_cache(maxsize=64)
def _triton_reader(device: torch.device, blocks: int, size: int, warps: int) -> Callable[[Tensor], Tensor]:
    import triton
    import triton.language as tl

    @triton.jit
    def read(data, out, total, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # noqa: N803
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        program, programs = tl.program_id(0), tl.num_programs(0)
        lanes = tl.arange(0, BLOCK)
        found = tl.zeros([BLOCK], tl.int32)
        for start in range(program * BLOCK, total, programs * BLOCK):
            found += tl.load(data + start + lanes, eviction_policy="evict_first")
        if EARLY:
            tl.extra.cuda.gdc_wait()
        # Never true of random bytes, which the compiler cannot know: it has to load them all.
        tl.store(out + lanes, found, mask=found == 0x5EED5EED)

    properties = torch.cuda.get_device_properties(device)
    blocks_at_once, pdl = blocks * properties.multi_processor_count or 1 << 30, properties.major >= 9
    out = torch.zeros(size // 4, dtype=torch.int32, device=device)
    options = {"launch_pdl": True} if pdl else {}

    def run(data: Tensor) -> Tensor:
        words = data.view(torch.int32)
        grid = (min(blocks_at_once, data.numel() // size),)
        read[grid](words, out, words.numel(), BLOCK=size // 4, EARLY=pdl, num_warps=warps, **options)
        return out

    return run
