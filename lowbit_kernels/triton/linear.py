"""Rows for op ``linear``: weights of any format in the canonical layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import FORMATS, format_named
from lowbit.scheme import PLAIN_SCALES, Scheme

from ..registry import Call, Kernel, register
from .decodings import FLOATS, INTEGERS, POWERS, TABLE, decoding, table_of

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


# ---- what the kernels take ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def how_of(scheme: Scheme) -> dict[str, Any]:
    """The compile-time constants that every kernel takes from the scheme."""
    how = decoding(scheme.format)
    scale = None if scheme.scale in PLAIN_SCALES else decoding(scheme.scale)
    return {
        "BITS": scheme.bits,
        "KIND": how.kind,
        "FLIP": how.flip,
        "MANTISSA": how.mantissa,
        "SPECIAL": how.special,
        "FACTOR": how.factor,
        "SCALE_KIND": -1 if scale is None else scale.kind,
        "SCALE_MANTISSA": 0 if scale is None else scale.mantissa,
        "SCALE_SPECIAL": 0 if scale is None else scale.special,
        "SCALE_FACTOR": 1.0 if scale is None else scale.factor,
        "GROUP": 0 if scheme.group_size == -1 else scheme.group_size,
        "ZERO": {"none": 0, "int": 1, "float": 2}[scheme.zero_point],
        "HAS_OUTER": scheme.outer,
    }


def _aligned(packed: Tensor, scheme: Scheme, k: int) -> bool:
    """Whether words of eight codes start at multiples of their size."""
    size = 8 if scheme.bits == 8 else 4
    return k % 8 == 0 and packed.stride(0) % size == 0 and packed.data_ptr() % size == 0


class Parts:
    """A weight's parts as the kernels take them: pointers, strides and constants."""

    def __init__(self, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, scheme: Scheme, k: int) -> None:
        packed, scale = _rows_contiguous(packed), _rows_contiguous(scale)
        zero = None if zero is None else _rows_contiguous(zero)
        how = how_of(scheme)
        table = table_of(scheme.format, packed.device) if how["KIND"] == TABLE else scale
        scales = table_of(scheme.scale, packed.device) if how["SCALE_KIND"] == TABLE else scale
        self.pointers = (packed, scale, scale if zero is None else zero, scale if outer is None else outer)
        self.tables = (table, scales)
        self.strides = (packed.stride(0), scale.stride(0), 0 if zero is None else zero.stride(0))
        self.constants = how | {"ALIGNED": _aligned(packed, scheme, k)}
        if scheme.group(k) >= k:
            self.constants["GROUP"] = 0


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """``tensor`` [N, C] with its columns side by side; a slice of rows or columns is taken as it is."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


@functools.lru_cache(maxsize=32)
def starts_early(device: torch.device) -> bool:
    """Whether kernels may start before those ahead of them have ended."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def on_cuda(device: torch.device) -> bool:
    """Whether kernels may hold PTX."""
    return device.type == "cuda" and torch.version.cuda is not None


def launch_options(device: torch.device) -> dict[str, Any]:
    # A fused multiply-add rounds once less; Triton warns where nobody chooses.
    return {"enable_fp_fusion": True} | ({"launch_pdl": True} if starts_early(device) else {})


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


# ---- one row of x ------------------------------------------------------------------------------------------------


def gemv_config(n: int, k: int) -> dict[str, int]:
    """Rows, words and warps of a block, as measured on an H200."""
    words = -(-k // 8)
    warps = 4 if words >= 128 else 2 if words >= 64 else 1
    wide = 2 if words >= 64 * warps else 1
    rows = 4 if n >= 4096 else 2 if n >= 2048 else 1
    return {"ROWS": rows, "WORDS": 32 * warps * wide, "num_warps": warps}


def gemv_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None,
    scheme: Scheme, config: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """``x @ W.T + bias`` for one row of ``x`` [..., K] and a canonical weight [N, K]."""
    from .gemv import gemv

    *lead, k = x.shape
    n = packed.shape[0]
    y = torch.empty(n, dtype=x.dtype, device=x.device)
    if not k or not n:
        return (y.zero_() if bias is None else y.copy_(bias)).reshape(*lead, n)
    row = x.reshape(k)
    weight = Parts(packed, scale, zero_point, outer, scheme, k)
    config = dict(config or gemv_config(n, k))
    with on_device(x.device):
        gemv[(-(-n // config["ROWS"]),)](
            row,
            *weight.pointers,
            row if bias is None else bias.contiguous(),
            *weight.tables,
            y,
            n,
            k,
            0,
            row.stride(0),
            *weight.strides,
            **weight.constants,
            HAS_BIAS=bias is not None,
            EVEN=weight.constants["ALIGNED"] and k % (8 * config["WORDS"]) == 0,
            EARLY=starts_early(x.device),
            **config,
            **launch_options(x.device),
        )
    return y.reshape(*lead, n)


# ---- several rows ------------------------------------------------------------------------------------------------


def gemm_config(m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, int]:
    """The block, its warps and stages, and how many parts of K, as measured on an H200."""
    if dtype == torch.float32:  # products on the ordinary cores: a block holds what fits their registers
        return {"BLOCK_M": 16 if m <= 16 else 32, "BLOCK_N": 32, "WORDS": 16, "num_warps": 4, "STAGES": 1, "PARTS": 1}
    if m == 1:
        block_m, block_n, warps, stages, each = 8, 32, 1, 3, 8
    elif m <= 16:
        block_m, block_n, warps, stages, each = (8 if m <= 8 else 16), 64, 2, (3 if m <= 8 else 4), 8
    elif m <= 64:
        block_m, block_n, warps, stages, each = (32 if m <= 32 else 64), 128, 4, 3, 2
    else:  # of an expert's rows there may be any number
        block_m, block_n, warps, stages, each = 128, 128, 8, 2, 2
    tiles = -(-n // block_n) * -(-m // block_m)
    parts = max(1, min(8, each * _PROCESSORS // tiles, k // 1024))  # blocks enough for several to share a processor
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "WORDS": 16, "num_warps": warps, "STAGES": stages, "PARTS": parts}


_PROCESSORS = 132  # multiprocessors, of an H200


def _exact_in_sixteen_bits(name: str) -> bool:
    """Whether the kernel makes the numbers of a format in bfloat16 and in float16 without rounding them."""
    how, bits = decoding(name), format_named(name).bits
    return how.kind == INTEGERS or (how.kind == FLOATS and bits - 1 - how.mantissa <= 5)


def how_to_scale(scheme: Scheme, k: int, words: int, dtype: torch.dtype) -> int:
    """``HOW`` of :func:`.gemm.gemm`: 0 where the numbers are exact in ``dtype`` and a group is a whole number of blocks."""
    how = decoding(scheme.format)
    group = 0 if scheme.group(k) >= k else scheme.group_size
    exact = (_exact_in_sixteen_bits(scheme.format) or dtype == torch.float32) and scheme.zero_point != "float"
    if exact and group % (8 * words) == 0:
        return 0
    kept = scheme.scale == "bf16" or (scheme.scale not in PLAIN_SCALES and decoding(scheme.scale).kind in (FLOATS, POWERS))
    whole = how.kind != INTEGERS or how.factor == 1
    return 1 if exact and whole and kept and dtype == torch.bfloat16 else 2


def gemm_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    config: dict[str, int] | None = None,
) -> Tensor:
    """``x @ W.T + bias``: ``x`` [..., K] with any strides and at least one row, the weight [N, K] canonical."""
    k = x.shape[-1]
    weight = Parts(packed, scale, zero_point, outer, scheme, k)
    y = _product(x.reshape(1, -1, k), weight, bias, packed.shape[0], scheme, config)
    return y.reshape(*x.shape[:-1], packed.shape[0])


def grouped_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """:func:`gemm_linear` for all experts in one launch: ``x`` [E, M, K], ``packed`` [E, N, bytes], ``bias`` [E, N]."""
    zero = None if zero_point is None else zero_point.flatten(0, 1)
    weight = Parts(packed.flatten(0, 1), scale.flatten(0, 1), zero, outer, scheme, x.shape[-1])
    return _product(x, weight, bias, packed.shape[1], scheme, None)


def _product(x: Tensor, weight: Parts, bias: Tensor | None, n: int, scheme: Scheme, config: dict[str, int] | None) -> Tensor:
    """``x`` [E, M, K] times the experts' weights, [E, M, N]."""
    from .gemm import add_parts, gemm, spread

    experts, m, k = x.shape
    y = torch.empty(experts, m, n, dtype=x.dtype, device=x.device)
    if not y.numel() or not k:
        return y.zero_() if bias is None else y.copy_(bias.reshape(-1, 1, n))
    rows = x.reshape(-1, k)
    config = dict(config or gemm_config(m, n, k, x.dtype))
    words = -(-k // (8 * config["WORDS"])) * config["WORDS"]
    columns = torch.empty(8, experts * m, words, dtype=x.dtype, device=x.device)
    parts, early, options = config["PARTS"], starts_early(x.device), launch_options(x.device)
    out = y if parts == 1 else torch.empty(parts, experts * m, n, dtype=torch.float32, device=x.device)
    shift = y if bias is None else bias.contiguous()
    how = how_to_scale(scheme, k, config["WORDS"], x.dtype)
    blocks = -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])
    sizes = (m, experts * m, n, k, words)
    with on_device(x.device):
        spread[experts * m, -(-words // 256)](
            rows, columns, experts * m, k, words, rows.stride(0), rows.stride(1), EARLY=early, WORDS=256, num_warps=4, **options
        )
        gemm[blocks, parts, experts](
            columns, *weight.pointers, shift, *weight.tables, out, *sizes, *weight.strides,
            **weight.constants, HAS_BIAS=bias is not None, HOW=how,
            EVEN=weight.constants["ALIGNED"] and k % (8 * config["WORDS"]) == 0, EARLY=early,
            ON_CUDA=on_cuda(x.device), **config, **options,
        )  # fmt: skip
        if parts > 1:
            add_parts[(-(-y.numel() // 1024),)](
                out, shift, y, y.numel(), m, n,
                HAS_BIAS=bias is not None, EARLY=early, PARTS=parts, BLOCK=1024, num_warps=4, **options,
            )  # fmt: skip
    return y


def widened(run: Any) -> Any:
    """``run`` in Triton's interpreter, which multiplies the raw bits of bf16: here bf16 is widened, which is exact, and the
    result rounded to it by torch."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return tensor.float() if tensor is not None and tensor.dtype == torch.bfloat16 else tensor

    @functools.wraps(run)
    def interpreted(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
    ) -> Tensor:
        return run(wide(x), packed, wide(scale), wide(zero), outer, wide(bias), scheme).to(x.dtype)

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


_MOST = 64  # rows of x above which a dequantized weight and the library's own product are faster
_WORDS = 16  # words of eight codes that a block of triton_gemm takes at a time: the least that a product of tensor cores takes


def _whole_blocks(size: int) -> str | None:
    return None if size == -1 or size % (8 * _WORDS) == 0 else f"takes -1 (the whole row) and multiples of {8 * _WORDS}"


def _better_in_floats(call: Call) -> str | None:
    """Four bits that the tensor cores' dtypes hold are unpacked two at a time there, which large weights gain from."""
    scheme = call.scheme
    if call.n * call.k < 1 << 25 or scheme.bits != 4 or call.dtype == torch.float32 or decoding(scheme.format).kind != INTEGERS:
        return None
    exact = how_to_scale(scheme, call.k, _WORDS, call.dtype) == 0
    return "four-bit integers of 2**25 weights and more: triton_gemm is faster" if exact and call.device == "cuda" else None


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
    also=_better_in_floats,
    tiles=((1, 4, 1024), (1, 4, 2048)),
)
_GEMM = dataclasses.replace(
    _GEMV,
    name="triton_gemm",
    run=gemm_linear,
    m=(1, _MOST),
    also=lambda call: None,
    formats=frozenset(name for name in FORMATS if _exact_in_sixteen_bits(name)),
    zero_points=frozenset({"none", "int"}),
    groups=_whole_blocks,
    tiles=((16, 64, 128), (64, 64, 128), (128, 128, 128)),
)
_ROUNDED = dataclasses.replace(
    _GEMM, name="triton_gemm_rounded", contract="weights rounded once", formats=None, zero_points=None, groups=groups
)
ON_A_CPU: dict[str, Any] = {"devices": frozenset({"cpu"}), "available": _interprets, "on_request": True}

_GROUPED = dataclasses.replace(_GEMM, name="triton_grouped", op="grouped_linear", run=grouped_linear, m=(1, None))
_GROUPED_ROUNDED = dataclasses.replace(
    _ROUNDED, name="triton_grouped_rounded", op="grouped_linear", run=grouped_linear, m=(1, None)
)

for _row, _rows in ((_GEMV, 1), (_GEMM, 17), (_ROUNDED, 17), (_GROUPED, 3), (_GROUPED_ROUNDED, 3)):
    register(_row)
    # The interpreter takes a second for what a GPU does in a microsecond: few rows of x, and the blocks that they are given.
    _few: dict[str, Any] = {"m": (1, _rows), "tiles": _row.tiles[:1]}
    register(dataclasses.replace(_row, name=f"{_row.name}_interpreted", run=widened(_row.run), **_few, **ON_A_CPU))
