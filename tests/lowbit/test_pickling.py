"""A QTensor goes through a file: into a process that knows lowbit by name alone, and always in the canonical layout."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import nn

from lowbit import QTensor
from tests import ROOT
from tests.lowbit.test_tensor import PROPERTY, make, qtensors, same

READ = """
import sys, torch
import lowbit
assert "lowbit.tensor" not in sys.modules
found = torch.load(sys.argv[1], weights_only=True)
torch.save({name: (q.dequantize(), str(q.scheme), isinstance(q, torch.nn.Parameter)) for name, q in found.items()}, sys.argv[2])
"""


@PROPERTY
@given(qtensors((2, 3, 4)))
def test_there_and_back(q: QTensor) -> None:
    file = io.BytesIO()
    torch.save([q, q.to(torch.bfloat16)], file)
    file.seek(0)
    back, half = torch.load(file, weights_only=True)
    same(back, q.dequantize())
    assert torch.equal(back, q)
    assert (back.scheme, back.stride(), half.dtype) == (q.scheme, q.stride(), torch.bfloat16)
    file.seek(0)
    assert torch.load(file, weights_only=True, map_location="meta")[0].packed.device.type == "meta"


def test_a_fresh_process_reads_it(tmp_path: Path) -> None:
    whole = make("int4", 3, 6, 40)
    tensors = {
        "plain": make("int3", 5, 13),
        "turned": make("nvfp4", 5, 48).t(),
        "row": make("nvfp4", 5, 48)[2],
        "slice": whole[1, 2:4, 8:24],
        "parameter": nn.Parameter(make("int8", 2, 8), requires_grad=False),
    }
    torch.save(tensors, tmp_path / "written.pt")
    files = [str(tmp_path / "written.pt"), str(tmp_path / "read.pt")]
    subprocess.run([sys.executable, "-c", READ, *files], check=True, cwd=ROOT)
    read = torch.load(tmp_path / "read.pt", weights_only=True)
    for name, q in tensors.items():
        dense, scheme, is_parameter = read[name]
        assert torch.equal(dense, q.dequantize())
        assert (scheme, is_parameter) == (str(q.scheme), name == "parameter")


def test_only_the_rebuilder_is_safe() -> None:
    file = io.BytesIO()
    torch.save({"scheme": make("int8", 2, 8).scheme}, file)
    file.seek(0)
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)
