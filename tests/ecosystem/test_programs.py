"""Programs that torch wrote down load and run in a process that does nothing but ``import lowbit``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit_kernels.schemas import SCHEMAS
from tests.ecosystem.test_compile import CASES
from tests.ecosystem.test_compile_modes import Several
from tests.lowbit.test_tensor import make

INT8 = "int8:row:fp32"
HOLDERS = ("QLinear", "dynamic activation", "static activation", "QEmbedding", "parameter, F.linear")
pytestmark = [  # of torch's own, while it exports and traces
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

# What a fresh process does with each file: load it, call it, and compare; ``import lowbit`` is all that it knows of lowbit.
FRESH = """
import sys, warnings
import torch
import lowbit

warnings.simplefilter("ignore")
LOADERS = {
    "export": lambda file: torch.export.load(file).module(),
    "jit": torch.jit.load,
    "aoti": torch._inductor.aoti_load_package,
    "state": lambda file: (lambda: {n: v.dequantize() if "weight" in n else v for n, v in torch.load(file).items()}),
}
folder, names = sys.argv[1], sys.argv[2:]
assert "lowbit_kernels.ops" not in sys.modules
for name in names:
    how = name.split("-")[0]
    inputs, wanted, changed = torch.load(f"{folder}/{name}.io")
    program = LOADERS[how](f"{folder}/{name}.pt2")
    torch.testing.assert_close(program(*inputs), wanted, msg=lambda text: f"{name}: {text}")
    if changed is not None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(program(*inputs), changed, msg=lambda text: f"{name} under autocast: {text}")
        x = inputs[0].clone().requires_grad_()
        program(x, *inputs[1:]).sum().backward()
        assert x.grad.abs().sum() > 0, name
"""


def run_fresh(folder: Path, names: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", FRESH, str(folder), *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def keep(folder: Path, name: str, inputs: tuple[Any, ...], module: Callable[..., Any]) -> None:
    """What the program has to give; a product under autocast too."""
    with torch.no_grad():
        wanted, changed = module(*inputs), None
        if (
            name.startswith("export")
            and inputs[0].is_floating_point()
            and "quantize" not in name.removeprefix("export-quantized")
        ):
            with torch.autocast("cpu", torch.bfloat16):
                changed = module(*inputs)
    torch.save((inputs, wanted, changed), folder / f"{name}.io")


class One(nn.Module):
    """One call of one operator, whose inputs are the first of its arguments."""

    def __init__(self, operator: str, *rest: Any) -> None:
        super().__init__()
        self.operator, self.rest = operator, rest

    def forward(self, *inputs: Tensor) -> Any:
        return getattr(torch.ops.lowbit, self.operator)(*inputs, *self.rest)


def one_of_each() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """A call of every operator, with the inputs that it is called with."""
    made = make("int4", 6, 40)
    how, weight = (str(made.scheme), "canonical"), (made.packed, made.scale, made.zero_point)
    experts = tuple(part.expand(2, *part.shape).contiguous() for part in weight)
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1))
    tokens = torch.ops.lowbit.rms_norm_quantize(x, None, 1e-6, INT8)
    calls: dict[str, tuple[tuple[Tensor, ...], tuple[Any, ...]]] = {
        "linear": ((x, *weight), (None, None, *how)),
        "quantized_linear": ((x, *weight), (None, None, *how, INT8, None)),
        "grouped_linear": ((x, *experts), (None, None, *how)),
        "experts_linear": ((x[0], *experts), (None, None, *how, torch.zeros(len(x[0]), dtype=torch.long))),
        "embedding": ((torch.arange(5), *weight), (None, *how, 40, torch.float32)),
        "dequantize": (weight, (None, *how, 40, torch.float32)),
        "quantize": ((x,), (how[0], "range")),
        "rms_norm_quantize": ((x,), (None, 1e-6, INT8)),
        "codes_linear": ((*tokens, *weight), (None, None, *how, INT8, 40, torch.float32)),
    }
    assert calls.keys() == SCHEMAS.keys() - {"versions"}  # which stands in no program: nothing reads what it returns
    return {name: (One(name, *rest), inputs) for name, (inputs, rest) in calls.items()}


@pytest.mark.works_with("compile", "export, in a fresh process")
def test_programs_load_in_a_fresh_process(tmp_path: Path) -> None:
    """One fresh process for all of them, since starting it takes longer than all that it does."""
    names = []
    programs = one_of_each()
    programs |= {
        case.replace(" ", "_"): (CASES[case][0](("int4", "nvfp4")[i % 2]), (CASES[case][1](4),)) for i, case in enumerate(HOLDERS)
    }
    for name, (module, inputs) in programs.items():
        names.append(f"export-{name}")
        torch.export.save(torch.export.export(module, inputs).run_decompositions(), tmp_path / f"{names[-1]}.pt2")
        keep(tmp_path, names[-1], inputs, module)
    for case in HOLDERS[:4]:
        build, inputs = CASES[case]
        module, x = build("int4"), inputs(4)
        names.append(f"jit-{case}".replace(" ", "_"))
        torch.jit.save(torch.jit.trace(module, (x,)), tmp_path / f"{names[-1]}.pt2")
        keep(tmp_path, names[-1], (x,), module)
    state = {"weight": make("int4", 6, 40), **CASES["QLinear"][0]("nvfp4").state_dict()}
    names.append("state-dict")
    torch.save(state, tmp_path / "state-dict.pt2")
    keep(tmp_path, names[-1], (), lambda: {**state, "weight": state["weight"].dequantize()})
    run_fresh(tmp_path, names)


@pytest.mark.works_with("compile", "AOTInductor, in a fresh process")
@pytest.mark.slow  # the compiler takes seconds for torch's headers alone
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_a_package_of_aot_inductor(tmp_path: Path) -> None:
    """One package of layers of all schemes: compiling it takes longer than all else."""
    module, x = Several().eval(), torch.randn(4, 64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(
            torch.export.export(module, (x,)),
            package_path=str(tmp_path / "aoti-layers.pt2"),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
    keep(tmp_path, "aoti-layers", (x,), module)
    run_fresh(tmp_path, ["aoti-layers"])


def test_what_importing_registers_is_what_is_meant() -> None:
    """Every operator that is named has a meaning, which has an autograd rule."""
    from lowbit_kernels import experts, fused_norm_quant, ops, versions

    meant = ops.OPERATORS | experts.OPERATORS | fused_norm_quant.OPERATORS | versions.OPERATORS
    assert meant.keys() == SCHEMAS.keys() == set(lowbit_operators())
    for name, schema in SCHEMAS.items():
        assert sys.modules[schema.module].OPERATORS[name] is meant[name]
        assert all(callable(function) for function in meant[name].rule)


def lowbit_operators() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].split(".")[0] for name in names if name.startswith("lowbit::")})
