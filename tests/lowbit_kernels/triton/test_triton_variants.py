"""How many kernels Triton compiles for the layers of a model: those that a first call waits for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit import SCHEMES, Scheme
from lowbit.packing import packed_size
from lowbit_kernels.triton import blocks, linear, tables

LLAMA = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))  # 3-8B: q and o, k and v, gate and up, down
FUSED = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
KERNELS = ("gemv_wide.gemv_wide", "gemv.gemv", "gemm.interleave_x", "gemm.gemm", "gemm.splitk_reduce")


class Recorder:
    """In place of a kernel: what a launch would be compiled for."""

    def __init__(self, name: str, seen: set[Any]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: Any, **constants: Any) -> None:
            kinds = tuple(
                (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, Tensor) else "1" if arg == 1 else arg % 16 == 0
                for arg in args
            )
            self.seen.add((self.name, kinds, tuple(sorted(constants.items()))))

        return launch


@pytest.fixture
def seen(monkeypatch) -> set[Any]:
    found: set[Any] = set()
    for name in KERNELS:
        module, kernel = name.split(".")
        recorder = Recorder(kernel, found)
        monkeypatch.setattr(importlib.import_module(f"lowbit_kernels.triton.{module}"), kernel, recorder)
    device = "NVIDIA H200"
    shipped = tables.read(tables.shipped_file(device), {"device": device})
    blocks.forget()
    monkeypatch.setattr(tables, "measured", lambda device: shipped)
    yield found
    monkeypatch.undo()
    blocks.forget()


def weight(scheme: Scheme, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None, None]:
    groups = scheme.groups(k)
    packed = torch.empty(n, packed_size(scheme.bits, k), dtype=torch.uint8)
    zero = None if scheme.zero_point_dtype is None else torch.empty(n, groups, dtype=scheme.zero_point_dtype)
    return packed, torch.empty(n, groups, dtype=scheme.scale_dtype), zero, None


def multiply(scheme: Scheme, n: int, k: int, m: int) -> None:
    x = torch.empty(m, k, dtype=torch.bfloat16)
    one = m == 1 and not (scheme.bits % 2 and n * k >= 1 << 25)
    (linear.gemv_linear if one else linear.gemm_linear)(x, *weight(scheme, n, k), None, scheme)


@pytest.mark.parametrize("shapes", [LLAMA, FUSED], ids=["apart", "fused"])
@pytest.mark.parametrize(("name", "most"), [("int4", 2), ("int4_sym", 2), ("mxfp4", 2), ("int8", 1), ("fp8", 1)])
def test_one_row_of_x_meets_the_layers_of_a_llama_in_few_kernels(name, most, shapes, seen):
    for n, k in shapes:
        multiply(SCHEMES[name], n, k, 1)
    assert 1 <= len(seen) <= most  # of four bits those for many rows and for few


def test_products_on_the_tensor_cores_share_theirs_but_for_the_sum_of_their_parts(seen):
    for n, k in LLAMA:
        multiply(SCHEMES["int3"], n, k, 1)
    assert sorted(name for name, *_ in seen) == ["gemm", "gemv", "interleave_x", "splitk_reduce", "splitk_reduce"]
