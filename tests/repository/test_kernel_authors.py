"""docs/kernel-authors.md: its example is within the contract that it names, its folders are there, kernels begin as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

CHECK = """
from tests.support.accuracy import linear_bound

x, bias = x.double(), bias.detach()
bound = linear_bound("exact", x, weight, bias, x @ weight.T + bias, torch.float32)
assert bool((error <= bound).all()), float((error / bound).max())
assert trace.kernels() == {"my_int4_row_gemm": 1}
print("within the contract")
"""


def test_the_example_is_within_its_contract():
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "kernel-authors.md").read_text(), re.DOTALL)
    assert block is not None
    # A process of its own: a row that is registered stays registered.
    run = subprocess.run([sys.executable, "-c", block[1] + CHECK], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("within the contract\n")


def test_every_folder_it_names_is_there():
    """Names in backticks that hold a slash are files or folders, or patterns of some."""
    text = (ROOT / "docs" / "kernel-authors.md").read_text()
    names = re.findall(r"`((?:csrc|lowbit_kernels|tests|lowbit|evals)/[^`\s]*)`", text)
    assert len(names) > 10
    for name in names:
        assert any(ROOT.glob(name.rstrip("/"))), name


PARTS = ("-->", "Contract:", "Limit:")


def head_of(path: Path) -> str:
    """What stands before the first line of code."""
    text = path.read_text()
    return text[
        : text.index("#pragma once" if path.suffix in (".cuh", ".h") else "#include" if path.suffix == ".cpp" else "import")
    ]


def kernel_files() -> list[Path]:
    """The files in which a kernel begins: those with an entry point of a GPU."""
    cuda = [path for path in (ROOT / "csrc" / "cuda").rglob("*.cuh") if "__global__" in path.read_text()]
    triton = [path for path in (ROOT / "lowbit_kernels" / "triton").glob("*.py") if "program_id" in path.read_text()]
    assert len(cuda) > 5
    assert len(triton) > 5
    return sorted([*cuda, *triton])


def made_of(path: Path) -> set[Path]:
    """A file of the CPU's kernels and the headers of its folder that it includes, and these include."""
    found, left = {path}, [path]
    while left:
        for name in re.findall(r'^#include "(\w+\.h)"', left.pop().read_text(), re.MULTILINE):
            if (header := path.parent / name).exists() and header not in found:
                found.add(header)
                left.append(header)
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "csrc" / "cpu" / "kernels").glob("*.cpp")), ids=lambda path: path.name)
def test_a_kernel_of_the_cpu_has_its_data_flow_contract_and_limit_in_one_of_its_files(path: Path) -> None:
    """Instruction sets share a header, in which the kernel begins."""
    files = made_of(path)
    assert any(all(part in head_of(file) for part in PARTS) for file in files), sorted(file.name for file in files)
    for name in {name for file in files for name in re.findall(r"\b(\w+\.json)\b", head_of(file))}:
        assert (ROOT / "evals" / "results" / name).exists(), f"{path.name} names figures of {name}"


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_kernel_begins_with_its_data_flow_contract_and_limit(path: Path) -> None:
    head = head_of(path)
    for part in PARTS:
        assert part in head, f"the head of {path.name} lacks {part}"
    for name in re.findall(r"\b(\w+\.json)\b", head):
        assert (ROOT / "evals" / "results" / name).exists(), f"{path.name} names figures of {name}"
