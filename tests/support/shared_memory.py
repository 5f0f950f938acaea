"""Bytes of shared memory that a block of Triton's products takes, compiled for a GPU that need not be there:

    python -m tests.support.shared_memory COMPUTE_CAPABILITY BYTES_OF_A_BLOCK        (without TRITON_INTERPRET)

prints a line of JSON for each case: what it takes, and the most that ``lowbit_kernels.triton.blocks`` expects.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from lowbit import SCHEMES, Scheme
from lowbit_kernels.triton import blocks, gemm, linear
from tests.lowbit_kernels.triton.test_triton_variants import weight

NAMES = ("int8", "nf4:g64:fp8_e4m3fn", "int1:g16:fp16", "fp8_e4m3fnuz:g48:e8m0")
SIZES = ((128, 64, 4096), (127, 64, 4001), (64, 4096, 4008))  # K of whole steps, that ends within a byte, within a step
_KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int32: "i32"}


class Launch:
    """In place of a kernel: the arguments of the last launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: Any, **constants: Any) -> None:
            self.args, self.constants = args, constants

        return launch

    def shared(self, capability: int) -> int:
        """The bytes that it takes, compiled as Triton would for these arguments."""
        sizes = ("M", "M_ALL")  # those that are not specialized
        signature, known, even = {}, {}, {}
        for i, (name, arg) in enumerate(zip(self.kernel.arg_names, self.args, strict=False)):
            signature[name] = f"*{_KINDS[arg.dtype]}" if isinstance(arg, Tensor) else "i32"
            if isinstance(arg, Tensor) or (arg % 16 == 0 and name not in sizes):
                even[(i,)] = [["tt.divisibility", 16]]
        for i, name in enumerate(self.kernel.arg_names[len(self.args) :], len(self.args)):
            signature[name], known[(i,)] = "constexpr", self.constants[name]
        target = GPUTarget("cuda", capability, 32)
        options = {"num_warps": self.constants["num_warps"]}
        return compile(ASTSource(self.kernel, signature, known, even), target=target, options=options).metadata.shared


def main(capability: int, most: int) -> None:
    product, gemm.interleave_x, gemm.splitk_reduce = Launch(gemm.gemm), Launch(None), Launch(None)
    gemm.gemm = product
    for name in NAMES:
        for m, n, k in SIZES:
            scheme, dtype = SCHEMES.get(name) or Scheme.parse(name), torch.bfloat16
            chosen = blocks.fitted("gemm", blocks.rule("gemm", scheme, dtype, m, n, k), scheme, dtype, k, most)
            with blocks.fixed("gemm", chosen):
                linear.gemm_linear(torch.empty(m, k, dtype=dtype), *weight(scheme, n, k), None, scheme)
            case = {"weight": name, "m": m, "n": n, "k": k, "block": chosen}
            held = blocks.shared_bytes("gemm", chosen, scheme, dtype, k)
            print(json.dumps({**case, "shared": product.shared(capability), "held": held}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
