"""What else there is for the same product: other libraries' kernels, each in a process of its own with a time limit.

    python -m lowbit.evals.peers tinygemm --shapes 4096x4096 --batches 1,16

prints a line of JSON for each figure. None of these libraries is needed by lowbit; one that is not installed is named so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cold_cache import Times, copies_of, timed

__all__ = ["BATCHES", "PEERS", "SHAPES", "Peer", "measure", "peers_on"]

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))
BATCHES = (1, 16, 64, 256)

Product = Callable[..., Tensor]
Prepare = Callable[[Tensor], tuple[Product, tuple[Tensor, ...]]]


class Peer(NamedTuple):
    """``prepare(weight)`` gives (product, parts): ``product(x, *parts)`` is ``x @ weight.T``. ``package``: what it needs.

    ``device``: on whose tensors it works. On the CPU peers are measured in this process, on a GPU each in one of its own.
    """

    bits: int
    package: str
    prepare: Prepare
    device: str = "cuda"


# ---- the peers -------------------------------------------------------------------------------------------------------


def _integers(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] from 0, scales and least values [N, K / group] of a plain rounding."""
    cut = weight.float().unflatten(-1, (-1, group))
    low, high = cut.amin(-1), cut.amax(-1)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
    codes = ((cut - low[..., None]) / scale[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(-2).to(torch.int32), scale, low


def _tinygemm(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    codes, scale, low = _integers(weight, 4, 128)
    nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, 8)
    middle = low + 8 * scale
    both = torch.stack((scale, middle), -1).transpose(0, 1).contiguous().to(weight.dtype)
    return (lambda x, w, s: torch.ops.aten._weight_int4pack_mm(x, w, 128, s)), (packed, both)


def _torch_int4(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    codes, scale, low = _integers(weight, 4, 128)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack((scale, low + 8 * scale), -1).transpose(0, 1).contiguous().to(weight.dtype)
    return (lambda x, w, s: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 128, s)), (packed, both)


def _torch_int8(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    scale = (weight.float().abs().amax(-1) / 127).clamp_min(1e-8)
    codes = (weight.float() / scale[:, None]).round().to(torch.int8)
    return torch.ops.aten._weight_int8pack_mm, (codes, scale.to(weight.dtype))


def _int8_compiled(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True
    scale = (weight.float().abs().amax(-1) / 127).clamp_min(1e-8)
    codes = (weight.float() / scale[:, None]).round().to(torch.int8)
    product = torch.compile(lambda x, w, s: torch.nn.functional.linear(x, w.to(x.dtype)) * s, dynamic=False)
    return product, (codes, scale.to(weight.dtype))


def _torchao_int8(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    import torchao.quantization as ao

    layer = _layer(weight)
    ao.quantize_(layer, ao.Int8WeightOnlyConfig())
    return torch.compile(torch.nn.functional.linear, dynamic=False), (layer[0].weight,)


def _torchao_int4(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    import torchao.quantization as ao

    layer = _layer(weight)
    ao.quantize_(layer, ao.Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))
    return torch.nn.functional.linear, (layer[0].weight,)


def _layer(weight: Tensor) -> torch.nn.Sequential:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return torch.nn.Sequential(layer)


def _gemlite(layer: Any) -> tuple[Product, tuple[Tensor, ...]]:
    from gemlite import forward_functional

    tensors, meta = layer.get_tensor_args(), layer.get_meta_args()
    return (lambda x, *parts: forward_functional(x, None, list(parts), meta)), tuple(tensors)


def _gemlite_int8(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    from gemlite.helper import A16W8_INT8

    return _gemlite(A16W8_INT8(device=str(weight.device), dtype=weight.dtype).from_weights(weight))


def _gemlite_int4(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    from gemlite.helper import A16W4_HQQ_INT

    codes, scale, low = _integers(weight, 4, 128)
    made = A16W4_HQQ_INT(device=str(weight.device), dtype=weight.dtype)
    zero = (-low / scale).reshape(-1, 1).to(weight.dtype)
    return _gemlite(made.from_weights(codes.to(torch.uint8), scale.reshape(-1, 1).to(weight.dtype), zero))


def _bitsandbytes(weight: Tensor) -> tuple[Product, tuple[Tensor, ...]]:
    import bitsandbytes as bnb

    packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")

    def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        quant_state = bnb.functional.QuantState(scale, state.shape, state.code, state.blocksize, state.quant_type, state.dtype)
        return bnb.matmul_4bit(x, codes.t(), quant_state)

    return product, (packed, state.absmax)


PEERS: dict[str, Peer] = {
    "int4 tinygemm": Peer(4, "torch", _tinygemm),
    "int8 torch.compile": Peer(8, "torch", _int8_compiled),
    "nf4 bitsandbytes": Peer(4, "bitsandbytes", _bitsandbytes),
    "int4 torchao": Peer(4, "torchao", _torchao_int4),
    "int8 torchao": Peer(8, "torchao", _torchao_int8),
    "int4 gemlite": Peer(4, "gemlite", _gemlite_int4),
    "int8 gemlite": Peer(8, "gemlite", _gemlite_int8),
    "int4 torch": Peer(4, "torch", _torch_int4, "cpu"),
    "int8 torch": Peer(8, "torch", _torch_int8, "cpu"),
}


def peers_on(device: str) -> list[str]:
    """The names of those that work on ``device``."""
    return [name for name, peer in PEERS.items() if peer.device == torch.device(device).type]


# ---- one peer, in this process ---------------------------------------------------------------------------------------


def rows_of(
    name: str, shapes: Sequence[tuple[int, int]], batches: Sequence[int], device: torch.device, repeats: int, cold: bool = True
) -> Iterator[dict[str, Any]]:
    """A row, or an error, for each shape and M: all shapes at one M before the next, since some tune each for long."""
    peer = PEERS[name]
    for m in batches:
        for n, k in shapes:
            where = {"peer": name, "m": m, "n": n, "k": k}
            torch.compiler.reset()  # or the many shapes would exhaust what it compiles for one function
            try:
                times, size, off = _row(peer, m, n, k, device, repeats, cold)
                yield {**where, "bits": peer.bits, "bytes": size, **times._asdict(), "relative_error": off}
            except Exception as error:  # whatever another library raises
                yield {**where, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _row(peer: Peer, m: int, n: int, k: int, device: torch.device, repeats: int, cold: bool) -> tuple[Times, int, float]:
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device) * k**-0.5
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    product, parts = peer.prepare(weight)
    truth = torch.nn.functional.linear(x, weight).float()
    off = float((product(x, *parts).float() - truth).norm() / truth.norm())
    size = sum(map(_bytes, parts))
    copies = [tuple(part.clone() for part in parts) for _ in range(copies_of(size, device, cold))]
    calls = [lambda x, parts=parts: product(x, *parts) for parts in copies]
    return timed(calls, x, chained=n == k, repeats=repeats), size, off


def _bytes(part: Tensor) -> int:
    """Bytes that a tensor holds; a subclass says the bytes of the float tensor that it stands for."""
    if hasattr(part, "__tensor_flatten__"):
        return sum(_bytes(getattr(part, name)) for name in part.__tensor_flatten__()[0])
    return part.nbytes


# ---- all of them -----------------------------------------------------------------------------------------------------


def measure(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]] = SHAPES,
    batches: Sequence[int] = BATCHES,
    device: str = "cuda",
    repeats: int = 9,
    seconds: float = 45,
    progress: Callable[[str], None] | None = None,
    cold: bool = True,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, failures) of the peers named; a process that takes longer than ``seconds`` is ended, and its rows so far kept."""
    there = peers_on(device)
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"no peer named {', '.join(unknown)} on {device}; there are {', '.join(there)}")
    rows, failures = [], []
    for name in names:
        if progress is not None:
            progress(name)
        version = _version(PEERS[name].package)
        if version is None:
            failures.append({"peer": name, "error": f"{PEERS[name].package} is not installed"})
            continue
        if PEERS[name].device == "cpu":
            found, reason = list(rows_of(name, shapes, batches, torch.device(device), repeats, cold)), None
        else:
            grid = ["--shapes", ",".join(f"{n}x{k}" for n, k in shapes), "--batches", ",".join(map(str, batches))]
            options = ["--device", device, "--repeats", str(repeats), *([] if cold else ["--warm"])]
            found, reason = _lines([name, *grid, *options], seconds)
        rows += [{**row, "version": version} for row in found if "error" not in row]
        failures += [row for row in found if "error" in row]
        if reason is not None:
            failures.append({"peer": name, "error": reason})
    return rows, failures


def _version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(arguments: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """The rows that a process printed, and why there are no more of them."""
    command = [sys.executable, "-m", f"{__package__}.peers", *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, stdout=out, stderr=log, start_new_session=True) as process:
            reason = None
            try:
                if code := process.wait(timeout=seconds):
                    log.seek(0)
                    stderr_tail = (log.read().strip().splitlines() or ["nothing on stderr"])[-1]
                    reason = f"ended with {code}: {stderr_tail[:300]}"
            except subprocess.TimeoutExpired:
                reason = f"not done after {seconds:g} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
        out.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith('{"peer"') and line.endswith("}")]
    return [json.loads(line) for line in lines], reason


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time one peer; a line of JSON for each figure.")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args(arguments)
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes.split(","))]
    batches = [int(m) for m in options.batches.split(",")]
    for row in rows_of(options.peer, shapes, batches, torch.device(options.device), options.repeats, not options.warm):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
