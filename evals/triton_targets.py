"""Triton's kernels compiled ahead of time for GPUs that are not here: which of them each generation's compiler takes.

    python -m lowbit.evals.triton_targets --out gpu_targets.json

What each row of the registry launches is recorded on a CPU, where nothing runs, and given to Triton's own compiler (LLVM with
ptxas, or with lld for AMD). That it compiles says nothing of its numbers or its speed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import SCHEMES, Scheme
from lowbit.packing import packed_size

from .results import write_result

__all__ = ["CASES", "TARGETS", "Target", "compile_for", "launches", "measure"]


class Target(NamedTuple):
    backend: str
    arch: int | str
    warp_size: int

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


TARGETS = (
    *(Target("cuda", arch, 32) for arch in (80, 89, 90, 100, 120)),
    Target("hip", "gfx942", 64),
    Target("hip", "gfx950", 64),
    Target("hip", "gfx1100", 32),
)
KERNELS = (
    "gemv.gemv", "gemv_wide.gemv_wide", "gemm.interleave_x", "gemm.gemm", "gemm.splitk_reduce", "w8a8_gemm.w8a8_gemm",
    "dequantize.dequantize", "quantize.quantize", "norm.rms_norm_quantize",
)  # fmt: skip
_N, _K = 1024, 4096


class Launch(NamedTuple):
    """A kernel and what it would be compiled for."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Recorder:
    def __init__(self, kernel: Any, seen: list[Launch]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self._seen.append(Launch(self._kernel, arguments, options))


@contextlib.contextmanager
def launches(target: Target) -> Iterator[list[Launch]]:
    """What Triton's rows launch within the block, as on a GPU of ``target``; nothing runs."""
    from lowbit_kernels.triton import operands
    from lowbit_kernels.triton.assembly import bytes_as_floats

    is_cuda = target.backend == "cuda"
    arch = int(target.arch) if is_cuda else 0
    answers: dict[str, Any] = {
        "on_cuda": lambda device: is_cuda,
        "supports_pdl": lambda device: arch >= 90,
        "assembly_for_bytes": lambda scheme, device: bytes_as_floats(scheme.fmt.decoding, arch) if is_cuda else "",
    }
    seen: list[Launch] = []
    with contextlib.ExitStack() as stack:
        names = ("operands", "linear", "activations", "rows", "quantization", "fused_norm_quant")
        for module in (operands, *(importlib.import_module(f"lowbit_kernels.triton.{name}") for name in names[1:])):
            for name, answer in answers.items():
                if hasattr(module, name):
                    stack.enter_context(_replaced(module, name, answer))
        for name in KERNELS:
            module_name, kernel = name.split(".")
            module = importlib.import_module(f"lowbit_kernels.triton.{module_name}")
            stack.enter_context(_replaced(module, kernel, _Recorder(getattr(module, kernel), seen)))
        yield seen


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def compile_for(launch: Launch, target: Target) -> int:
    """Bytes of the binary that ``launch`` compiles to; whatever Triton's compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    kernel = launch.kernel
    values = dict(zip(kernel.arg_names, launch.arguments, strict=False))
    values |= {name: value for name, value in launch.options.items() if name in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            signature[parameter.name], constants[i,] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        if (value.data_ptr() if isinstance(value, Tensor) else value if isinstance(value, int) else 1) % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.options.items() if name not in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    found = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
    return len(found.asm["cubin" if target.backend == "cuda" else "hsaco"])


# ---- cases -----------------------------------------------------------------------------------------------------------


def _weight(scheme: Scheme, experts: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    lead, groups = (experts, _N) if experts else (_N,), scheme.groups(_K)
    zero = None if scheme.zero_point_dtype is None else torch.empty(*lead, groups, dtype=scheme.zero_point_dtype)
    outer = torch.ones(1) if scheme.outer else None
    return (
        torch.empty(*lead, packed_size(scheme.bits, _K), dtype=torch.uint8),
        torch.empty(*lead, groups, dtype=scheme.scale_dtype),
        zero,
        outer,
    )


def _linear(name: str, scheme: str, m: int, dtype: torch.dtype) -> Callable[[], Any]:
    from lowbit_kernels.triton import linear, rows

    run = {"gemv": linear.gemv_linear, "gemm": linear.gemm_linear, "dequant_gemm": rows.dequantized_linear}[name]
    return lambda: run(torch.empty(m, _K, dtype=dtype), *_weight(SCHEMES[scheme]), None, SCHEMES[scheme])


def _grouped(scheme: str) -> Callable[[], Any]:
    from lowbit_kernels.triton import linear

    return lambda: linear.grouped_linear(
        torch.empty(2, 8, _K, dtype=torch.bfloat16), *_weight(SCHEMES[scheme], 2), None, SCHEMES[scheme]
    )


def _activations(name: str) -> Callable[[], Any]:
    from lowbit_kernels.triton import activations

    scheme = SCHEMES[name]
    x = torch.empty(64, _K, dtype=torch.bfloat16)
    return lambda: activations.w8a8_linear(x, *_weight(scheme), None, scheme, Scheme(scheme.format, scale="fp32"), None)


def _norm(name: str) -> Callable[[], Any]:
    from lowbit_kernels.triton import fused_norm_quant

    x, weight = torch.empty(8, _K, dtype=torch.bfloat16), torch.empty(_K, dtype=torch.bfloat16)
    return lambda: fused_norm_quant.rms_norm_quantize(x, weight, 1e-6, Scheme(SCHEMES[name].format, scale="fp32"))


_FORMATS = ("int4", "int8", "int3", "nf4", "fp8", "fp6", "mxfp4", "nvfp4")
CASES: dict[str, Callable[[], Callable[[], Any]]] = {}
"""What makes a call of each row, by a name; the call itself is made within :func:`launches`."""
for _scheme in _FORMATS:
    for _dtype in (torch.bfloat16, torch.float16):
        CASES[f"gemv, {_scheme}, {str(_dtype).removeprefix('torch.')}"] = partial(_linear, "gemv", _scheme, 1, _dtype)
    for _m in (8, 128):
        CASES[f"gemm, {_scheme}, M = {_m}"] = partial(_linear, "gemm", _scheme, _m, torch.bfloat16)
for _scheme in ("int4", "nf4"):
    CASES[f"grouped_gemm, {_scheme}"] = partial(_grouped, _scheme)
for _scheme in ("int4", "mxfp4"):
    CASES[f"dequantize, {_scheme}"] = partial(_linear, "dequant_gemm", _scheme, 64, torch.bfloat16)
for _scheme in ("int8", "fp8"):
    CASES[f"w8a8_gemm, {_scheme}"] = partial(_activations, _scheme)
    CASES[f"rms_norm_quantize, {_scheme}"] = partial(_norm, _scheme)


def measure(
    cases: Sequence[str] = tuple(CASES), targets: Sequence[Target] = TARGETS, progress: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """For each case and target: how many kernels, ``bytes`` of their binaries, or ``error``. Equal launches compile once."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET turns Triton's compiler off: unset it before Python starts")
    rows = []
    for target in targets:
        done: dict[str, int] = {}
        for case in cases:
            with launches(target) as seen, contextlib.suppress(RuntimeError):
                CASES[case]()()
            row: dict[str, Any] = {"case": case, "target": str(target), "kernels": len(seen), "bytes": 0, "error": None}
            for launch in seen:
                key = repr(
                    (
                        launch.kernel.__name__,
                        [(a.dtype, a.dim()) if isinstance(a, Tensor) else a for a in launch.arguments],
                        launch.options,
                    )
                )
                try:
                    if key not in done:
                        done[key] = compile_for(launch, target)
                    row["bytes"] += done[key]
                except Exception as error:
                    row["error"] = f"{launch.kernel.__name__}: {type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
                    break
            progress(f"{row['target']:8} {case}: {row['error'] or row['bytes']}")
            rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compile Triton's kernels for GPUs that are not here.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    write_result(options.out, {"rows": measure()})
    failed = [row for row in json.loads(options.out.read_text(encoding="utf-8"))["rows"] if row["error"] or not row["kernels"]]
    print(f"{len(failed)} failed")


if __name__ == "__main__":
    main()
