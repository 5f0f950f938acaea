"""What there is to run on: versions, processor, GPUs, and which kernels this machine can run."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .version import __version__

if TYPE_CHECKING:
    from lowbit_kernels.registry import Kernel

__all__ = ["Environment", "KernelState", "cpu_instructions", "env", "only_device", "usable_device"]

# Those that decide which kernel is compiled or chosen; a processor lists a hundred more.
_INSTRUCTION_SETS = (
    "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


@dataclass(frozen=True)
class KernelState:
    """A row of the registry: ``missing`` says what this machine lacks for it and what brings it; None if it can run."""

    name: str
    op: str
    missing: str | None
    on_request: bool


@dataclass(frozen=True)
class Environment:
    """What :func:`env` found; ``str()`` of it is for people.

    Attributes:
        versions: of lowbit, torch, CUDA (of the torch build), triton, transformers and Python; those that are there.
        cpu: ``name``, ``instruction_sets``, ``threads`` that torch uses, ``system``.
        gpus: ``name``, ``arch`` (90 for an H100) and ``memory`` in bytes of each.
        kernels: every row, in order of preference.
    """

    versions: dict[str, str]
    cpu: dict[str, Any]
    gpus: tuple[dict[str, Any], ...]
    kernels: tuple[KernelState, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Five lines: versions, processor, GPU, and of which kernels how many are ready."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if name != "safetensors")
        gpus = ", ".join(f"{gpu['name']} (sm_{gpu['arch']}, {gpu['memory'] / 2**30:.0f} GiB)" for gpu in self.gpus)
        cpu = f"{self.cpu['name']}, {self.cpu['threads']} threads, {self.cpu['system']}"
        lines = [versions, f"{'CPU':8}{cpu}", f"{'GPU':8}{gpus or 'none that torch sees'}"]
        for kind in ("cpu", "cuda", "triton"):
            rows = [row for row in self.kernels if row.name.startswith(f"{kind}_") and not row.on_request]
            ready = sum(row.missing is None for row in rows)
            reason = "" if ready == len(rows) else f": {next(row.missing for row in rows if row.missing)}"
            lines.append(f"{kind:8}{ready} of {len(rows)} kernels ready{reason}")
        return "\n".join(lines)

    def details(self) -> str:
        """Everything: each version, the instruction sets, and each kernel with what is missing for it."""
        lines = [f"{name:14}{version}" for name, version in self.versions.items()]
        sets = " ".join(self.cpu["instruction_sets"]) or "instruction sets unknown"
        lines.append(f"{'cpu':14}{self.cpu['name']}, {self.cpu['threads']} threads, {self.cpu['system']} ({sets})")
        for gpu in self.gpus:
            lines.append(f"{'gpu':14}{gpu['name']}, sm_{gpu['arch']}, {gpu['memory'] / 2**30:.0f} GiB")
        if not self.gpus:
            lines.append(f"{'gpu':14}none that torch sees")
        lines.append("kernels")
        width = max(len(kernel.name) for kernel in self.kernels)
        for kernel in self.kernels:
            asked = " (only on request)" if kernel.on_request else ""
            lines.append(
                f"  {kernel.name:{width}}  {kernel.op:17}  {'ready' if kernel.missing is None else kernel.missing}{asked}"
            )
        return "\n".join(lines)


def env() -> Environment:
    """What lowbit finds on this machine. Asks the CUDA driver, and loads the compiled libraries to see that they load."""
    from lowbit_kernels.registry import kernels

    gpus = _gpus()
    here = {"cpu", "cuda"} if gpus else {"cpu"}
    rows = tuple(KernelState(row.name, row.op, _missing(row, here), row.on_request) for row in kernels())
    return Environment(_versions(), _cpu(), gpus, rows)


def cpu_instructions() -> str | None:
    """What the CPU kernels are made of: avx512, avx2 or portable; None where there is no C++ library."""
    from lowbit_kernels.build import CPU

    return None if CPU.missing() else str(torch.ops.lowbit_cpu.instructions())


def usable_device(device: str | torch.device) -> torch.device:
    """``device``; ``ValueError`` where no tensor can be on it here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"device {device!r} cannot be used here ({words[0]}): give cpu, or one that lowbit env lists") from None


def only_device(model: nn.Module) -> torch.device | None:
    """The device on which all parameters of ``model`` are; None where they are on several, or have no values at all."""
    devices = {parameter.device for parameter in model.parameters()}
    return next(iter(devices)) if len(devices) == 1 and next(iter(devices)).type != "meta" else None


def _missing(row: Kernel, here: set[str]) -> str | None:
    reason = row.available()
    if reason is None and row.devices is not None and not row.devices & here:
        return f"needs a device of type {' or '.join(sorted(row.devices))}: run it on a machine that has one"
    return reason


def _versions() -> dict[str, str]:
    found = {"lowbit": __version__, "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda of torch"] = torch.version.cuda
    for name in ("triton", "transformers", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version()}


def _cpu() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return {
        "name": name[1].strip() if name else platform.processor() or platform.machine(),
        "instruction_sets": [flag for flag in _INSTRUCTION_SETS if flag in has],
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _gpus() -> tuple[dict[str, Any], ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append({"name": gpu.name, "arch": 10 * gpu.major + gpu.minor, "memory": gpu.total_memory})
    return tuple(found)
