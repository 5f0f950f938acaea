"""Rows for op ``linear``: weights of any format in the canonical layout."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from lowbit.decoding import FLOATS, INTEGERS, POWERS
from lowbit.formats import FormatSet, get_format
from lowbit.scheme import PLAIN_SCALES, Scheme

from ..epilogues import EPILOGUES
from ..registry import Call, Kernel, register
from .blocks import block, narrow, supports_wide
from .operands import (
    Parts,
    assembly_for,
    assembly_for_bytes,
    launch_options,
    on_cuda,
    on_device,
    ramp,
    register_limit,
    supports_pdl,
)

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


# ---- one row of x ------------------------------------------------------------------------------------------------


def gemv_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None,
    scheme: Scheme, epilogue: str = "none",
) -> Tensor:  # fmt: skip
    """``x @ W.T + bias`` for one row of ``x`` [..., K] and a canonical weight [N, K], after the function ``epilogue``."""
    *lead, k = x.shape
    n = packed.shape[0]
    y = torch.empty(n, dtype=x.dtype, device=x.device)
    if not k or not n:
        return EPILOGUES[epilogue].run(y.zero_() if bias is None else y.copy_(bias)).reshape(*lead, n)
    row = x.reshape(k)
    weight = Parts(packed, scale, zero_point, outer, scheme, k)
    size = block("gemv", x.device, scheme, x.dtype, 1, n, k)
    if "QUADS" in size and not (supports_wide(scheme, x.dtype, k) and row.stride(0) == 1 and weight.rows_on_16_bytes):
        size = narrow(n, k)
    with on_device(x.device):
        (_gemv_wide if "QUADS" in size else _gemv)(row, weight, bias, y, n, k, dict(size), epilogue)
    return y.reshape(*lead, n)


def _gemv(
    row: Tensor, weight: Parts, bias: Tensor | None, y: Tensor, n: int, k: int, size: dict[str, int], epilogue: str
) -> None:
    from .gemv import gemv

    gemv[(-(-n // size["ROWS"]),)](
        row, *weight.pointers, row if bias is None else bias.contiguous(), *weight.tables, y, n, k, 0, row.stride(0),
        *weight.strides, **weight.constants, HAS_BIAS=bias is not None, EPILOGUE=epilogue,
        EVEN=weight.constants["ALIGNED"] and k % (8 * size["WORDS"]) == 0,
        PDL=supports_pdl(row.device), ASM=assembly_for_bytes(weight.scheme, row.device), **size, **launch_options(row.device),
    )  # fmt: skip


def _gemv_wide(
    row: Tensor, weight: Parts, bias: Tensor | None, y: Tensor, n: int, k: int, size: dict[str, int], epilogue: str
) -> None:
    from .gemv_wide import gemv_wide

    constants = {name: value for name, value in weight.constants.items() if name not in ("BITS", "SPECIAL", "ALIGNED")}
    gemv_wide[(-(-n // size["ROWS"]),)](
        row, *weight.pointers, row if bias is None else bias.contiguous(), weight.tables[1], y, n, k, 0x4B000000,
        *weight.strides, **constants, HAS_BIAS=bias is not None, EPILOGUE=epilogue, FULL=k >= 32 * size["QUADS"],
        PDL=supports_pdl(row.device), ON_CUDA=on_cuda(row.device), **size, **launch_options(row.device),
    )  # fmt: skip


# ---- several rows ------------------------------------------------------------------------------------------------


def _exact_in_sixteen_bits(name: str) -> bool:
    """Whether a format's values are exact in bfloat16 and in float16."""
    fmt = get_format(name)
    dec, bits = fmt.decoding, fmt.bits
    return dec.kind == INTEGERS or (dec.kind == FLOATS and bits - 1 - dec.mantissa <= 5)


def scale_mode(scheme: Scheme, k: int, words: int, dtype: torch.dtype) -> int:
    """``SCALE_MODE`` of :func:`.gemm.gemm`: 0 where values are exact in ``dtype`` and a group is a whole number of blocks."""
    dec = scheme.fmt.decoding
    group = 0 if scheme.group(k) >= k else scheme.group_size
    exact = (_exact_in_sixteen_bits(scheme.format) or dtype == torch.float32) and scheme.zero_point != "float"
    if exact and group % (8 * words) == 0:
        return 0
    kept = scheme.scale == "bf16" or (
        scheme.scale not in PLAIN_SCALES and get_format(scheme.scale).decoding.kind in (FLOATS, POWERS)
    )
    whole = dec.kind != INTEGERS or dec.factor == 1
    return 1 if exact and whole and kept and dtype == torch.bfloat16 else 2


def gemm_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    epilogue: str = "none",
) -> Tensor:
    """``x @ W.T + bias``: ``x`` [..., K] with any strides and at least one row, the weight [N, K] canonical; after the function
    ``epilogue``."""
    k = x.shape[-1]
    weight = Parts(packed, scale, zero_point, outer, scheme, k)
    y = _product(x.reshape(1, -1, k), weight, bias, packed.shape[0], scheme, epilogue)
    return y.reshape(*x.shape[:-1], packed.shape[0])


def grouped_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None,
    scheme: Scheme, epilogue: str = "none",
) -> Tensor:  # fmt: skip
    """:func:`gemm_linear` for all experts in one launch: ``x`` [E, M, K], ``packed`` [E, N, bytes], ``bias`` [E, N]."""
    zero = None if zero_point is None else zero_point.flatten(0, 1)
    weight = Parts(packed.flatten(0, 1), scale.flatten(0, 1), zero, outer, scheme, x.shape[-1])
    return _product(x, weight, bias, packed.shape[1], scheme, epilogue)


def _product(x: Tensor, weight: Parts, bias: Tensor | None, n: int, scheme: Scheme, epilogue: str) -> Tensor:
    """``x`` [E, M, K] times the experts' weights, [E, M, N]."""
    from .gemm import gemm, interleave_x, splitk_reduce

    experts, m, k = x.shape
    y = torch.empty(experts, m, n, dtype=x.dtype, device=x.device)
    if not y.numel() or not k:
        return EPILOGUES[epilogue].run(y.zero_() if bias is None else y.copy_(bias.reshape(-1, 1, n)))
    rows = x.reshape(-1, k)
    config = dict(block("gemm", x.device, scheme, x.dtype, m, n, k))
    parts, registers = config.pop("SPLIT_K"), config.pop("REGISTERS", None)
    words = -(-k // (8 * config["WORDS"])) * config["WORDS"]
    columns = torch.empty(experts * m, 8 * words, dtype=x.dtype, device=x.device)
    pdl, options = supports_pdl(x.device), launch_options(x.device)
    out = y if parts == 1 else torch.empty(parts, experts * m, n, dtype=torch.float32, device=x.device)
    shift = y if bias is None else bias.contiguous()
    mode = scale_mode(scheme, k, config["WORDS"], x.dtype)
    blocks = -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])
    sizes = (m, experts * m, n, k, words)
    even = weight.constants["ALIGNED"] and k % (8 * config["WORDS"]) == 0
    with on_device(x.device):
        interleave_x[experts * m, -(-words // 256)](
            rows, columns, k, words, rows.stride(0), rows.stride(1),
            PDL=pdl, WORDS=config["WORDS"], BLOCK=256, num_warps=4, **options,
        )  # fmt: skip
        gemm[blocks, parts, experts](
            columns, *weight.pointers, shift, *weight.tables, ramp(x.device), out, *sizes, *weight.strides,
            **weight.constants, HAS_BIAS=bias is not None and parts == 1, EPILOGUE=epilogue if parts == 1 else "none",
            SCALE_MODE=mode,
            EVEN=even, WHOLE=weight.groups_are_word_aligned, PDL=pdl,
            PREFETCH=_PREFETCH_STEPS if pdl and even and weight.rows_on_16_bytes and m > 32 else 0,
            ASM=assembly_for(scheme, x), **config, **options, **register_limit(registers, x.device),
        )  # fmt: skip
        if parts > 1:
            splitk_reduce[(-(-y.numel() // 1024),)](
                out, shift, y, y.numel(), m, n,
                HAS_BIAS=bias is not None, EPILOGUE=epilogue, PDL=pdl, SPLIT_K=parts, BLOCK=1024, num_warps=4, **options,
            )  # fmt: skip
    return y


def widened(run: Any) -> Any:
    """``run`` in Triton's interpreter, which multiplies the raw bits of bfloat16: bfloat16 is widened, which is exact, and torch
    rounds the result.
    """

    def wide(tensor: Tensor | None) -> Tensor | None:
        return tensor.float() if tensor is not None and tensor.dtype == torch.bfloat16 else tensor

    @functools.wraps(run)
    def interpreted(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None,
        scheme: Scheme, **more: Any,
    ) -> Tensor:  # fmt: skip
        return run(wide(x), packed, wide(scale), wide(zero), outer, wide(bias), scheme, **more).to(x.dtype)

    return interpreted


# ---- rows --------------------------------------------------------------------------------------------------------


def groups(size: int) -> str | None:
    return None if size == -1 or size % 8 == 0 else "takes -1 (the whole row) and multiples of 8"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _in_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def compiles() -> str | None:
    if not _installed():
        return "triton is not installed: pip install triton"
    return "TRITON_INTERPRET=1 turns Triton's compiler off: unset it before Python starts" if _in_interpreter() else None


def _interprets() -> str | None:
    if not _installed():
        return "triton is not installed: pip install triton"
    if not _in_interpreter():
        return "on a CPU Triton runs only in its interpreter: set TRITON_INTERPRET=1 before Python starts"
    return None


_MAX = 64  # rows of x above which dequantizing and torch's GEMM are faster
_PREFETCH_STEPS = 8  # steps of triton_gemm whose codes are prefetched while the kernel ahead ends; slower for fewer rows of x
_WORDS = 16  # words of eight codes in a step of triton_gemm: the least K of a tensor-core product


def _whole_blocks(size: int) -> str | None:
    return None if size == -1 or size % (8 * _WORDS) == 0 else f"takes -1 (the whole row) and multiples of {8 * _WORDS}"


def _defer_gemv(call: Call) -> str | None:
    """Large weights of odd width are faster on the tensor cores even for one row of x: composing codes of two planes takes
    triton_gemv, which does so code by code, longer than reading them.
    """
    return "triton_gemm" if call.scheme.bits % 2 and call.n * call.k >= 1 << 25 else None


_GEMV = Kernel(
    "triton_gemv",
    "linear",
    gemv_linear,
    "exact",
    devices=frozenset({"cuda", "xpu"}),
    groups=groups,
    dtypes=_DTYPES,
    m=(1, 1),
    available=compiles,
    defer_to=_defer_gemv,
    epilogues=EPILOGUES.builtin_names(),
    tiles=((1, 4, 1024), (1, 4, 2048)),
)
_GEMM = dataclasses.replace(
    _GEMV,
    name="triton_gemm",
    run=gemm_linear,
    m=(1, _MAX),
    defer_to=lambda call: None,
    formats=FormatSet(lambda fmt: _exact_in_sixteen_bits(fmt.name)),
    zero_points=frozenset({"none", "int"}),
    groups=_whole_blocks,
    tiles=((16, 64, 128), (64, 128, 128), (128, 128, 128)),
)
_ROUNDED = dataclasses.replace(
    _GEMM, name="triton_gemm_rounded", contract="weights rounded once", formats=None, zero_points=None, groups=groups
)
ON_A_CPU: dict[str, Any] = {"devices": frozenset({"cpu"}), "available": _interprets, "on_request": True}

_GROUPED = dataclasses.replace(_GEMM, name="triton_grouped_gemm", op="grouped_linear", run=grouped_linear, m=(1, None))
_GROUPED_ROUNDED = dataclasses.replace(
    _ROUNDED, name="triton_grouped_gemm_rounded", op="grouped_linear", run=grouped_linear, m=(1, None)
)

for _row, _rows in ((_GEMV, 1), (_GEMM, 17), (_ROUNDED, 17), (_GROUPED, 3), (_GROUPED_ROUNDED, 3)):
    register(_row)
    # A second in the interpreter is a microsecond on a GPU: few rows of x, and one block size.
    _few: dict[str, Any] = {"m": (1, _rows), "tiles": _row.tiles[:1]}
    register(dataclasses.replace(_row, name=f"{_row.name}_interpreted", run=widened(_row.run), **_few, **ON_A_CPU))
