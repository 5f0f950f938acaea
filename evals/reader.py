"""The physical limit: how fast this machine reads bytes and does nothing else with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["reader"]


def reader(device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that reads every byte of a contiguous uint8 tensor (of a multiple of 16 KiB) and returns a sum."""
    return _triton_reader() if device.type == "cuda" else _sum


def _sum(data: Tensor) -> Tensor:
    # 64-bit integers: one vector addition for each 64 bytes, which costs nothing beside the load.
    return data.view(torch.int64).sum()


def _triton_reader() -> Callable[[Tensor], Tensor]:
    import triton
    import triton.language as tl

    @triton.jit
    def read(data, out, size, BLOCK: tl.constexpr):  # noqa: N803
        program, programs = tl.program_id(0), tl.num_programs(0)
        total = tl.zeros([BLOCK], tl.int32)
        for start in range(program * BLOCK, size, programs * BLOCK):
            total += tl.load(data + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
        tl.store(out + program, tl.sum(total))

    def run(data: Tensor) -> Tensor:
        words = data.view(torch.int32)
        programs = 8 * torch.cuda.get_device_properties(data.device).multi_processor_count
        out = torch.empty(programs, dtype=torch.int32, device=data.device)
        read[(programs,)](words, out, words.numel(), BLOCK=4096, num_warps=8)
        return out

    return run
