"""Which block each Triton kernel is the quickest with for a model's layers: what ``lowbit tune`` measures and keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table

from lowbit import NoKernelError, Plan, Scheme, strict
from lowbit.layer_config import LayerConfig
from lowbit.recipe import Recipe, Rule
from lowbit_kernels.triton import blocks, tables

from .bench_layers import BenchLayer
from .cold_cache import timed
from .gemv import device_name

__all__ = ["BATCHES", "Problem", "measure", "problems", "table"]

BATCHES = (1, 4, 16, 64)
_GAIN = 0.98  # a block must be this much quicker than the best so far: less is noise
# (kernel, row of the registry); of one kernel the first row that takes a call stands for the others.
_ROWS = (("gemv", "triton_gemv"), ("gemm", "triton_gemm"), ("gemm", "triton_gemm_rounded"))
_W8A8_ROWS = (("w8a8_gemm", "triton_w8a8_gemm_int8"), ("w8a8_gemm", "triton_w8a8_gemm_fp8_e4m3fn"))


class Problem(NamedTuple):
    """Layers that one block serves: the schemes of weight and x (or nothing), and rows and columns of the weight."""

    weight: str
    activation: str
    n: int
    k: int

    @property
    def recipe(self) -> Recipe:
        activation = Scheme.parse(self.activation) if self.activation else None
        return Recipe((Rule("*", LayerConfig(Scheme.parse(self.weight), activation)),), str(self))

    def __str__(self) -> str:
        return f"{self.weight}{' x ' if self.activation else ''}{self.activation} {self.n}x{self.k}"


def problems(plan: Plan) -> list[Problem]:
    """Those of a model, the largest first: layers whose blocks are kept under one name count once."""
    found: dict[tuple[Any, ...], Problem] = {}
    for layer in plan.quantized:
        if layer.config is None or layer.kind != "linear":
            continue
        n, k = layer.shape
        weight, activation = layer.config.weight, layer.config.activation
        problem = Problem(str(weight), "" if activation is None else str(activation), n, k)
        found.setdefault((problem.activation, blocks.key("", weight, 1, n, k)), problem)
    return sorted(found.values(), key=lambda one: (-one.n * one.k, one))


def measure(
    asked: Iterable[Problem],
    batches: Sequence[int] = BATCHES,
    device: str | torch.device = "cuda",
    *,
    minutes: float = 5,
    repeats: int = 5,
    progress: Callable[[str, int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The best block of each problem and batch, with the microseconds behind it, and the table that keeps them.

    It ends after ``minutes`` at the latest but for the measurement that is under way: each problem has an equal share of what is
    left, and begins with the block that it has without a table.
    """
    where, begun = torch.device(device), clock()
    todo = [(problem, m) for problem in asked for m in sorted(set(batches))]
    seconds, rows, blocks_by_key = minutes * 60, [], {}
    made: tuple[Problem, BenchLayer, list[Any]] | None = None
    for done, (problem, m) in enumerate(todo):
        left = seconds - (clock() - begun)
        if left <= 0:
            break
        if progress is not None:
            progress(f"{problem} M={m}", done, len(todo))
        if made is None or made[0] != problem:
            made = None  # before more is asked for
            specimen = BenchLayer(problem.recipe, problem.n, problem.k, where, layout="canonical")
            made = problem, specimen, specimen.copies(cold=where.type != "cpu")
        share, known = left / (len(todo) - done), _rows(made[1].layer, m, where)
        for kernel, row in known:
            until = clock() + share / len(known)
            found = _best(kernel, row, made[1].layer, made[2], m, until, repeats, clock)
            if found is not None:
                rows.append({**problem._asdict(), "m": m, "row": row, **found})
                blocks_by_key[blocks.key(kernel, made[1].layer.scheme, m, problem.n, problem.k)] = found["block"]
    cases = {(r["weight"], r["activation"], r["n"], r["k"], r["m"]) for r in rows}
    return {
        "device": device_name(where), "holds_for": tables.described(where), "rows": rows, "blocks": blocks_by_key,
        "finished": len(cases), "asked": len(todo),
    }  # fmt: skip


def _rows(layer: Any, m: int, device: torch.device) -> list[tuple[str, str]]:
    """(kernel, row of the registry) of those that take ``m`` rows of x."""
    suffix = "_interpreted" if device.type == "cpu" else ""
    x = torch.zeros(m, layer.in_features, dtype=torch.bfloat16, device=device)
    found = []
    for kernel, name in _ROWS if layer.activation is None else _W8A8_ROWS:
        try:
            with strict(f"{name}{suffix}"), torch.no_grad():
                layer(x)
        except NoKernelError:
            continue
        if kernel not in (known for known, _ in found):
            found.append((kernel, f"{name}{suffix}"))
    return found


def _best(
    kernel: str, row: str, layer: Any, copies: list[Any], m: int, until: float, repeats: int, clock: Callable[[], float]
) -> dict[str, Any] | None:
    """The quickest of the candidates that there was time for; None where not even the first ran."""
    dtype = torch.float16 if layer.weight.device.type == "cpu" else torch.bfloat16  # the interpreter widens bfloat16
    x = torch.randn(m, layer.in_features, dtype=dtype, device=layer.weight.device)
    first = best = None
    tried, refused = 0, 0
    shared_bytes = blocks.shared_memory(layer.weight.device)
    for candidate in blocks.candidates(kernel, layer.scheme, dtype, m, layer.out_features, layer.in_features, shared_bytes):
        if tried and clock() >= until:
            break
        try:
            with blocks.fixed(kernel, candidate), strict(row):
                us = timed(copies, x, chained=layer.in_features == layer.out_features, repeats=repeats).us
        except torch.AcceleratorError:  # the device takes no more work
            raise
        except Exception:  # a compiler refuses blocks in many ways: too much shared memory, too many registers
            if not tried:
                raise
            refused += 1
            continue
        tried += 1
        first = us if first is None else first
        if best is None or us < _GAIN * best[0]:
            best = us, candidate
    if best is None or first is None:
        return None
    return {"us": best[0], "us_without": first, "block": dict(best[1]), "tried": tried, "refused": refused}


def table(found: dict[str, Any]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    made = Table(title=f"blocks on {found['device']}", title_justify="left")
    for name in ("layer", "N x K", "M", "kernel", "us before", "us", "block"):
        made.add_column(name, justify="left" if name in ("layer", "kernel", "block") else "right", no_wrap=True)
    for r in found["rows"]:
        block = " ".join(f"{name}={size}" for name, size in r["block"].items())
        made.add_row(r["weight"], f"{r['n']}x{r['k']}", str(r["m"]), r["row"], f"{r['us_without']:.1f}", f"{r['us']:.1f}", block)
    return made
