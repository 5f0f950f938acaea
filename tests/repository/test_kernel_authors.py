"""The worked example of docs/kernel-authors.md runs as it stands, and its kernel is within the contract that it names."""

from __future__ import annotations

import re
import subprocess
import sys

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
