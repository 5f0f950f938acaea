"""Who may import whom, read from the source; and what importing lowbit costs, measured in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase

import pytest

import lowbit
from tests import ROOT
from tests.support.module_graph import circles, graph, imports, layers, modules

PACKAGES = ("lowbit", "lowbit_kernels", "evals")

LEAVES = (
    "lowbit.catalog", "lowbit.decoding", "lowbit.formats", "lowbit.packing", "lowbit.scheme", "lowbit.grid", "lowbit.scales",
)  # fmt: skip
EVERYTHING = ("lowbit", "lowbit.*", "lowbit_kernels", "lowbit_kernels.*")

# Patterns of modules (the first that matches counts) and what of this project each may import. A module without a row
# fails, so that its place is a decision.
RULES: dict[str, tuple[str, ...]] = {
    # All else is imported when it is used.
    "lowbit": (
        "lowbit.autocast", "lowbit.pickling", "lowbit.pretrained", "lowbit.pretrained.import_hooks", "lowbit.tensor",
        "lowbit.version",
    ),
    "lowbit.version": (),
    "lowbit.layer_groups": (),
    "lowbit.plugins": (),
    "lowbit.catalog": ("lowbit.plugins",),
    "lowbit.decoding": (),
    "lowbit.formats": ("lowbit.catalog", "lowbit.decoding"),
    "lowbit.packing": (),
    "lowbit.tensor_table": (),
    "lowbit.scheme": ("lowbit.catalog", "lowbit.formats", "lowbit.packing"),
    "lowbit.grid": ("lowbit.scheme", "lowbit.formats"),
    "lowbit.scales": ("lowbit.scheme", "lowbit.grid", "lowbit.formats"),
    "lowbit.torch_state": (),
    "lowbit.adapters": (),
    "lowbit.statistics": ("lowbit.torch_state",),
    "lowbit.transforms": (),
    "lowbit.algorithms": ("lowbit.catalog", "lowbit.algorithms.*"),
    "lowbit.algorithms.*": (
        "lowbit.scheme", "lowbit.scales", "lowbit.grid", "lowbit.statistics", "lowbit.torch_state", "lowbit.algorithms.*",
    ),
    "lowbit.options": (),
    # Files know schemas and bytes, and nothing of the tensor.
    "lowbit.checkpoint.tensor_file": (),
    "lowbit.checkpoint.provenance": (),
    "lowbit.checkpoint.card": (),
    "lowbit.checkpoint.header": (*LEAVES, "lowbit.checkpoint.tensor_file"),
    "lowbit.checkpoint.staging": ("lowbit.checkpoint.tensor_file",),
    "lowbit.checkpoint.shards": (
        *LEAVES, "lowbit.checkpoint.tensor_file", "lowbit.checkpoint.header", "lowbit.checkpoint.staging",
    ),
    **dict.fromkeys(
        (
            "lowbit.qtensor", "lowbit.tensor", "lowbit.tensor_ops", "lowbit.tensor_products", "lowbit.tensor_writes",
            "lowbit.tensor_arithmetic", "lowbit.tensor_scaling", "lowbit.tensor_shards", "lowbit.expert_products",
            "lowbit.experts",
            "lowbit.sharding", "lowbit.pickling",
            "lowbit.quantized_module", "lowbit.linear", "lowbit.fusion", "lowbit.fused", "lowbit.fused_norm_quant",
            "lowbit.embedding",
            "lowbit.decoder", "lowbit.decoder.*",
            "lowbit.module_attributes", "lowbit.registration",
            "lowbit.equivalence", "lowbit.layers",
            "lowbit.calibration", "lowbit.calibration.*", "lowbit.replacement", "lowbit.streaming", "lowbit.streaming.*",
            "lowbit.rounding", "lowbit.expert_rounding",
            "lowbit.mixed_precision", "lowbit.mixed_precision.*", "lowbit.diagnosis", "lowbit.diagnosis.*",
            "lowbit.quantize", "lowbit.planning", "lowbit.plans", "lowbit.recipe", "lowbit.layer_config", "lowbit.api",
            "lowbit.methods", "lowbit.rewrite", "lowbit.rewrites", "lowbit.rewrites.*",
            "lowbit.__main__", "lowbit.command", "lowbit.command.*", "lowbit.environment",
            "lowbit.pretrained", "lowbit.pretrained.*", "lowbit.placement", "lowbit.placement.*",
            "lowbit.diffusion", "lowbit.diffusion.*", "lowbit.dequantize",
            "lowbit.checkpoint", "lowbit.checkpoint.assembly", "lowbit.checkpoint.inventory", "lowbit.checkpoint.hf_config",
        ),
        EVERYTHING,
    ),
    "lowbit.autocast": ("lowbit_kernels.schemas",),
    "lowbit_kernels": ("lowbit_kernels.*",),
    "lowbit_kernels.schemas": ("lowbit_kernels.rules",),  # importing lowbit runs both
    "lowbit_kernels.rules": (),
    "lowbit_kernels.*": (*LEAVES, "lowbit_kernels", "lowbit_kernels.*"),
    "evals": ("lowbit", "lowbit.*", "evals.*"),
    "evals.crossover": ("lowbit", "lowbit.*", "lowbit_kernels.crossovers", "evals.*"),  # writes what that module reads
    "evals.tuning": ("lowbit", "lowbit.*", "lowbit_kernels.triton", "lowbit_kernels.triton.*", "evals.*"),  # fills its tables
    "evals.triton_targets": ("lowbit", "lowbit.*", "lowbit_kernels.triton", "lowbit_kernels.triton.*", "evals.*"),
    "evals.*": ("lowbit", "lowbit.*", "evals", "evals.*"),
}  # fmt: skip

# Which packages from elsewhere a module may import, where that is a rule too.
OTHERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LEAVES, "lowbit.torch_state", "lowbit.statistics", "lowbit.transforms", "lowbit.algorithms*"), ("torch",)),
    "lowbit_kernels.triton*": ("torch", "triton"),
    "lowbit_kernels*": ("torch",),
}


FILES = modules(*PACKAGES)


def first_match(table: dict[str, tuple[str, ...]], module: str) -> tuple[str, ...] | None:
    return next((allowed for pattern, allowed in table.items() if fnmatchcase(module, pattern)), None)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    allowed, others = first_match(RULES, module), first_match(OTHERS, module)
    if allowed is None:
        return [f"{module} has no row in RULES: add one, and say what it may import"]
    found = []
    for target, name in imports(source, module, is_package):
        top = target.split(".")[0]
        imported = target if name is None else f"{target}.{name}"
        if top in PACKAGES:
            if not any(fnmatchcase(target, pattern) for pattern in allowed):
                found.append(f"{module} imports {imported}; it may import {', '.join(allowed) or 'nothing of this project'}")
            elif module.split(".")[0] == "evals" and top == "lowbit" and not is_public(target, name):
                found.append(f"{module} imports {imported}, which is not public")
        elif others is not None and top not in others and top not in sys.stdlib_module_names:
            found.append(f"{module} imports {imported}; from elsewhere it may import {', '.join(others)}")
    return found


def is_public(target: str, name: str | None) -> bool:
    if target == "lowbit" and name is not None:
        return name in lowbit.__all__
    return not any(part.startswith("_") for part in (*target.split("."), *([name] if name else [])))


@pytest.mark.parametrize("module", FILES)
def test_imports(module):
    path = FILES[module]
    assert violations(path.read_text(), module, path.name == "__init__.py") == []


def test_no_circle():
    """Of all import statements, in functions too; the names that lowbit gives when they are asked for count as imports."""
    edges = graph(modules("lowbit", "lowbit_kernels"))
    edges["lowbit"] |= lowbit._NAMES.keys()
    assert circles(edges) == []
    assert sorted(module for layer in layers(edges) for module in layer) == sorted(edges)


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c"]]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}}, [["a", "b"], ["c", "d", "e"]]),
    ],
)
def test_circles_are_found(edges, found):
    assert circles(edges) == found


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("def f():\n    from . import scales", {"lowbit.scales"}),
        ("from . import scheme as s, SCHEMES", {"lowbit.scheme", "lowbit"}),
        ("if TYPE_CHECKING:\n    from .grid import Scales\nelse:\n    import lowbit.tensor", {"lowbit.tensor"}),
    ],
)
def test_what_is_an_import(source, seen):
    assert {target for target, _ in imports(source, "lowbit.newcomer", False, typing=False)} == seen


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lowbit.formats", "from .scheme import Scheme"),
        ("lowbit.formats", "import numpy"),
        ("lowbit.packing", "def f():\n    from lowbit.formats import FORMATS"),
        ("lowbit.scheme", "from . import scales"),
        ("lowbit.grid", "import lowbit.tensor"),
        ("lowbit.scales", "from lowbit_kernels.ops import LIBRARY"),
        ("lowbit.algorithms.rtn", "from ..tensor import QTensor"),
        ("lowbit.algorithms.rtn", "import triton"),
        ("lowbit_kernels.reference", "from lowbit.tensor import QTensor"),
        ("lowbit_kernels.reference", "from lowbit import QTensor"),
        ("lowbit_kernels.cpu", "import triton"),
        ("lowbit.checkpoint.header", "from .tensor import QTensor"),
        ("evals.sqnr", "from lowbit import _home"),
        ("evals.sqnr", "from lowbit.tensor import _assemble"),
        ("evals.sqnr", "import lowbit_kernels.ops"),
        ("lowbit.newcomer", "import torch"),
    ],
)
def test_the_rules_refuse(module, source):
    assert len(violations(source, module)) == 1


FRESH = """
import sys
import torch
known = set(sys.modules)
import lowbit
print(torch.cuda.is_initialized(), *sorted(set(sys.modules) - known))
"""
LIGHT = {
    *("lowbit", "lowbit.autocast", "lowbit.pickling", "lowbit.pretrained", "lowbit.pretrained.import_hooks", "lowbit.version"),
    *("lowbit_kernels", "lowbit_kernels.rules", "lowbit_kernels.schemas"),
}


def test_import_is_light():
    """Beside torch it brings a few small modules of its own and nothing else."""
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, check=True)
    cuda, *new = done.stdout.split()
    assert cuda == "False"
    assert set(new) == LIGHT


def test_public_names_bring_neither_triton_nor_cuda():
    code = """
import sys
import torch, lowbit
lowbit.QTensor, lowbit.Scheme, lowbit.pack, lowbit.quantize_, lowbit.trace_kernels
print("triton" in sys.modules, torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
