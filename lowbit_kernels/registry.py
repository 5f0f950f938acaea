"""The registry: which kernels exist, which one a call takes, why each other one refused, and what ran."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from lowbit.catalog import cached, invalidate_caches
from lowbit.scheme import PLAIN_SCALES, Scheme

from . import crossovers
from .epilogues import epilogue
from .layouts import LAYOUTS, Parts
from .storage_check import check_storage

__all__ = [
    "Call",
    "Kernel",
    "NoKernelError",
    "TraceEntry",
    "Trace",
    "explain",
    "is_strict",
    "kernels",
    "note",
    "preferred_layout",
    "profiled",
    "register",
    "select",
    "strict",
    "trace",
    "warn_of_reference",
    "observed",
]

# In order of preference: the first row that does not refuse a call runs, unless a table of this GPU names a faster one. The
# reference is last and refuses nothing. Rows that other packages register come first.
_BACKENDS = (
    "lowbit_kernels.cuda",
    "lowbit_kernels.cuda_experts",
    "lowbit_kernels.cuda_activations",
    "lowbit_kernels.cpu",
    "lowbit_kernels.cpu_dequant_gemm",
    "lowbit_kernels.cpu_interleaved",
    "lowbit_kernels.cpu_grouped",
    "lowbit_kernels.cpu_experts",
    "lowbit_kernels.cpu_quantize",
    "lowbit_kernels.triton",
    "lowbit_kernels.reference",
)
_rows: list[Kernel] = []


class NoKernelError(RuntimeError):
    """Strict mode found no kernel for a call; the message explains each refusal."""


@dataclass(frozen=True)
class Call:
    """What a kernel is chosen by. ``m``, ``n``, ``k``: rows of x, rows and columns of the weight. ``activation``: what x is
    rounded to, in quantized_linear and codes_linear. ``method``: how scales are chosen, in quantize. ``epilogue``: the
    function at the end of a product, which no row refuses.
    """

    op: str
    device: str
    arch: int
    layout: str
    scheme: Scheme
    dtype: torch.dtype
    m: int
    n: int
    k: int
    activation: Scheme | None = None
    method: str | None = None
    epilogue: str = "none"


@dataclass(frozen=True)
class Kernel:
    """A row: what a kernel takes, and the function that runs it.

    A field left at None takes everything. ``m`` is an inclusive range; ``arch`` the least architecture (90 for an H100,
    0 elsewhere). ``available()`` tells why the kernel cannot run on this machine, or None. ``contract`` names the
    accuracy: ``"exact"`` (fp32 sums of the exact quantized weights, rounded once at the end), ``"split-int8 (3 limbs)"`` (the
    same, with x to 2^-22 of the largest of each 512 columns), ``"split-int8 (2 limbs)"`` (the same, with x to 1/65278 of it),
    ``"weights rounded once"`` (to the dtype of x, before the multiplication), or ``"fp8 sums"`` (products of e4m3 in the sums of
    the tensor cores, which keep 14 bits and leave them for fp32 every 128 columns). ``predicate`` tells what of a call no field
    names and the kernel refuses.
    ``defer_to``: the row that is faster for a call, where it takes it too; ``select`` names that one.
    ``on_request``: taken only where :func:`strict` names it (an interpreter, say, is right but slow).
    ``epilogues``: the functions at the end of a product that its ``run`` takes as ``epilogue``; others are applied to its result.
    ``multiples``: the N and the K that it takes are multiples of these.
    ``tiles``: (M, N, K) of the blocks it works in, whose edges tests probe.
    ``layout`` None: reads canonical bytes, and takes a weight in any layout, whose bytes are restored for each call.
    ``home``: the module that registered the row; :func:`register` fills it in.
    """

    name: str
    op: str
    run: Callable[..., Any]
    contract: str
    devices: frozenset[str] | None = None
    layout: str | None = "canonical"
    formats: Set[str] | None = None
    zero_points: frozenset[str] | None = None
    scales: frozenset[str] | None = None
    groups: Callable[[int], str | None] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    m: tuple[int, int | None] = (0, None)
    arch: int = 0
    available: Callable[[], str | None] = lambda: None
    predicate: Callable[[Call], str | None] = lambda call: None
    defer_to: Callable[[Call], str | None] = lambda call: None
    on_request: bool = False
    epilogues: frozenset[str] = frozenset({"none"})
    multiples: tuple[int, int] = (1, 1)
    tiles: tuple[tuple[int, int, int], ...] = ()
    home: str = ""

    def refusal(self, call: Call) -> str | None:
        """The field of ``call`` that this kernel refuses, with the reason; None if it takes the call."""
        scheme = call.scheme
        if not self.name.startswith("reference") and (not call.k or (not call.n and call.op != "rms_norm_quantize")):
            return f"size: takes weights with elements, got N={call.n} K={call.k}"
        for field, takes, got in (
            ("device", self.devices, call.device),
            ("format", self.formats, scheme.format),
            ("zero_point", self.zero_points, scheme.zero_point),
            ("scale", self.scales, scheme.scale + ("+outer" if scheme.outer else "")),
            ("dtype", self.dtypes, call.dtype),
        ):
            if takes is not None and got not in takes:
                return f"{field}: takes {', '.join(sorted(str(t) for t in takes))}, got {got}"
        if self.layout is not None and self.layout != call.layout:
            return f"layout: takes {self.layout}, got {call.layout}"
        if self.groups is not None and (reason := self.groups(scheme.group_size)) is not None:
            return f"group_size: {reason}, got {scheme.group_size}"
        low, high = self.m
        if call.m < low or (high is not None and call.m > high):
            return f"M: takes {low}..{'any' if high is None else high}, got {call.m}"
        for name, size, of in (("N", call.n, self.multiples[0]), ("K", call.k, self.multiples[1])):
            if size % of:
                return f"{name}: takes multiples of {of}, got {size}"
        if call.arch < self.arch:
            return f"arch: needs at least {self.arch}, got {call.arch}"
        if (reason := self.predicate(call)) is not None:
            return reason
        if (reason := self.available()) is not None:
            return f"unavailable: {reason}"
        return None


ALL_PLAIN_SCALES = frozenset(PLAIN_SCALES)


def register(kernel: Kernel) -> Kernel:
    """Add a row, at any time: products that ran before take it from their next call on.

    A row from outside of the library comes before the library's own. Among several of those the order is that of their names,
    and never that of registering, which imports decide: ``defer_to`` says where another one is to run. A weight keeps the layout
    that it was given when it came to its device.
    """
    if any(row.name == kernel.name for row in _rows):
        raise ValueError(f"a kernel named {kernel.name!r} is registered already")
    kernel = replace(kernel, home=sys._getframe(1).f_globals.get("__name__", ""))
    _rows.append(kernel)
    invalidate_caches()
    return kernel


@cached(maxsize=1)
def kernels() -> tuple[Kernel, ...]:
    """Every row, in order of preference."""
    for backend in _BACKENDS:
        importlib.import_module(backend)
    return tuple(sorted(_rows, key=_priority))


def _priority(kernel: Kernel) -> tuple[int, str]:
    """The backend's place in the order of preference, whatever the order of imports. Within a backend rows keep the order of
    registration.
    """
    own = next((i for i, backend in enumerate(_BACKENDS) if f"{kernel.home}.".startswith(f"{backend}.")), None)
    return (-1, kernel.name) if own is None else (own, "")


def _is_builtin(kernel: Kernel) -> bool:
    return _priority(kernel)[0] >= 0


# ---- selection -------------------------------------------------------------------------------------------------

# The names given to each open block of strict, outermost first.
_strict: ContextVar[tuple[frozenset[str], ...]] = ContextVar("lowbit_strict", default=())
# Whether strict or trace is open here, so that every call has to be selected and noted.
observed: ContextVar[bool] = ContextVar("lowbit_observed", default=False)


@contextlib.contextmanager
def _open(blocks: ContextVar[tuple[Any, ...]], block: object) -> Iterator[None]:
    """Adds ``block`` to ``blocks`` for the duration. Blocks may end in any order: each removes itself only."""
    blocks.set((*blocks.get(), block))
    observed.set(True)
    try:
        yield
    finally:
        remaining = list(blocks.get())
        if (i := max((i for i, other in enumerate(remaining) if other is block), default=None)) is not None:
            del remaining[i]
        blocks.set(tuple(remaining))
        observed.set(bool(_strict.get() or _traces.get()))


def _only() -> frozenset[str] | None:
    """The kernels named by the innermost open :func:`strict`; None where none is open."""
    return open_blocks[-1] if (open_blocks := _strict.get()) else None


def select(call: Call) -> Kernel:
    """The row that runs ``call``: of those that take it the one that :mod:`.crossovers` names or that the first one defers to;
    else the first.

    Raises :class:`NoKernelError` where strict mode leaves none.
    """
    return _select(call, _only())


@cached(maxsize=8192)
def _select(call: Call, only: frozenset[str] | None) -> Kernel:
    takes = (k for k in kernels() if k.op == call.op and _allowed(k, only) and k.refusal(call) is None)
    first = next(takes, None)
    if first is not None:
        faster = _faster(first, call)
        return first if faster is None else next((kernel for kernel in takes if kernel.name == faster), first)
    wanted = "a kernel other than the reference" if not only else " or ".join(sorted(only))
    lines = "\n".join(f"  {name}: {reason or 'not asked for'}" for name, reason in explain(call))
    raise NoKernelError(f"strict mode asks for {wanted}, and none takes {call}:\n{lines}")


def _faster(first: Kernel, call: Call) -> str | None:
    """The row that was measured to be faster than ``first``; None where none is known."""
    if first.name.startswith("reference"):
        return None
    measured = crossovers.fastest(call.op, call.arch, call.scheme, call.layout, call.m, call.n, call.k)
    if measured is not None and not _is_builtin(first) and any(row.name == measured and _is_builtin(row) for row in kernels()):
        measured = None  # the library's tables know only its own rows
    return measured or first.defer_to(call)


def _allowed(kernel: Kernel, only: frozenset[str] | None) -> bool:
    if only:
        return kernel.name in only
    return not kernel.on_request and (only is None or not kernel.name.startswith("reference"))


def preferred_layout(call: Call) -> str:
    """The layout that weights of such calls are best stored in: the first whose own rows take every M; else canonical. Layouts of
    other packages come first.

    The layout and the M of ``call`` do not matter, and neither does :func:`strict`: a weight is arranged once.
    """
    for layout in LAYOUTS.ordered_names():
        ranges = []
        is_kept = layout != "canonical" and (call.op != "embedding" or LAYOUTS[layout].is_looked_up)
        for kernel in kernels() if is_kept else ():
            first = max(kernel.m[0], 1)
            if kernel.op != call.op or kernel.layout != layout or kernel.on_request:
                continue
            if kernel.refusal(replace(call, layout=layout, m=first)) is None:
                ranges.append((first, kernel.m[1]))
        covered: int | None = 0  # every M from 1 to this one is covered; None: all above, too
        for first, last in sorted(ranges, key=lambda span: span[0]):
            if covered is not None and first <= covered + 1:
                covered = None if last is None else max(covered, last)
        if covered is None:
            return layout
    return "canonical"


def explain(call: Call) -> list[tuple[str, str | None]]:
    """(kernel, why it refused ``call``) for every row of its operator; None where it takes it."""
    named = _only() or frozenset()
    return [
        (
            kernel.name,
            f"only on request: strict({kernel.name!r})"
            if kernel.on_request and kernel.name not in named
            else kernel.refusal(call),
        )
        for kernel in kernels()
        if kernel.op == call.op
    ]


@contextlib.contextmanager
def strict(*names: str) -> Iterator[None]:
    """Within the block nothing runs on the reference; with ``names``, only those kernels run.

    A call that none of them takes raises :class:`NoKernelError`.
    """
    known = {kernel.name for kernel in kernels()}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"no kernel named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    with _open(_strict, frozenset(names)):
        yield


# ---- traces ----------------------------------------------------------------------------------------------------


class TraceEntry(NamedTuple):
    """One kind of call that ran: kernel, contract, shape and layout of the weight."""

    op: str
    kernel: str
    contract: str
    scheme: str
    dtype: str
    device: str
    m: int
    n: int
    k: int
    layout: str = "canonical"
    epilogue: str = "none"  # and where it was applied


class Trace:
    """What ran within :func:`trace`: ``counts`` maps each :class:`TraceEntry` to its number of calls."""

    def __init__(self) -> None:
        self.counts: Counter[TraceEntry] = Counter()

    def kernels(self) -> Counter[str]:
        """Calls of each kernel."""
        total: Counter[str] = Counter()
        for entry, count in self.counts.items():
            total[entry.kernel] += count
        return total

    def __str__(self) -> str:
        if not self.counts:
            return "no quantized operator ran"
        rows = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return "\n".join(
            f"{count:6d} x {r.op} by {r.kernel} ({r.contract}), {r.scheme}, {r.dtype} on {r.device}, M={r.m} N={r.n} K={r.k}"
            f"{'' if r.layout == 'canonical' else ', from ' + r.layout}{'' if r.epilogue == 'none' else ', ' + r.epilogue}"
            for r, count in rows
        )


_traces: ContextVar[tuple[Trace, ...]] = ContextVar("lowbit_traces", default=())


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Collect a trace of every quantized operator that runs within the block (in this thread)."""
    record = Trace()
    with _open(_traces, record):
        yield record


def note(op: str, kernel: str, contract: str, scheme: str, dtype: torch.dtype, device: str, m: int, n: int, k: int) -> None:
    """Adds a call that ran past :func:`run`, several operators at once, to the open traces."""
    for record in _traces.get():
        record.counts[TraceEntry(op, kernel, contract, scheme, str(dtype).removeprefix("torch."), device, m, n, k)] += 1


def is_strict() -> bool:
    """Whether :func:`strict` is open here."""
    return bool(_strict.get())


_warned: set[tuple[str, str]] = set()  # operators and devices


def warn_of_reference(kernel: Kernel, call: Call) -> None:
    """Warns, once for each operator and device, that products run on the reference for want of a kernel."""
    if not kernel.name.startswith("reference") or "linear" not in call.op or (call.op, call.device) in _warned or _strict.get():
        return
    reason = next((why for _, why in explain(call) if why is not None and why.startswith("unavailable: ")), None)
    if reason is None:
        return
    _warned.add((call.op, call.device))
    warnings.warn(
        f"{call.op} on {call.device} runs on the reference, which is slow. {reason.removeprefix('unavailable: ')}. "
        "lowbit env lists every kernel",
        RuntimeWarning,
        stacklevel=3,
    )


def run(call: Call, *args: Any) -> Any:
    """Select a kernel for ``call``, note it in the open traces, and run it. Raises where a tensor has lost its memory."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            check_storage(arg)
    kernel = select(call)
    warn_of_reference(kernel, call)
    for record in _traces.get():
        record.counts[
            TraceEntry(
                call.op, kernel.name, kernel.contract, str(call.scheme),
                str(call.dtype).removeprefix("torch."), call.device, call.m, call.n, call.k,
                call.layout + " restored to canonical" if kernel.layout is None and call.layout != "canonical" else call.layout,
                epilogue_placement(kernel, call.epilogue),
            )
        ] += 1  # fmt: skip
    if kernel.layout is None and call.layout != "canonical":
        at = {"dequantize": 0, "codes_linear": 2}.get(call.op, 1)  # position of the weight's parts: behind x, its codes, or the
        # indices
        parts = LAYOUTS[call.layout].restore(Parts(*args[at : at + 3]), call.scheme, call.k)
        args = (*args[:at], *parts, *args[at + 3 :])
    with profiled(kernel.name):
        if call.epilogue == "none":
            return kernel.run(*args)
        if call.epilogue in kernel.epilogues:
            return kernel.run(*args, epilogue=call.epilogue)
        return epilogue(call.epilogue).run(kernel.run(*args))


_unprofiled = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range ``name`` in what torch's profiler records, while it does."""
    return record_function(name) if profiler._is_profiler_enabled else _unprofiled


def epilogue_placement(kernel: Kernel, name: str) -> str:
    """Where the function ``name`` is applied in a product of ``kernel``, in words."""
    return name if name == "none" else f"{name} {'within' if name in kernel.epilogues else 'on its result'}"
