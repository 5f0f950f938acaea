"""Several processes that calibrate one model: what they make is what one makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import lowbit
from lowbit.checkpoint.tensor_file import TensorFile
from tests import ROOT
from tests.support.models import exam_and_text, word_model


def under_torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 3 blocks of 160,000 weights, and a text."""
    folder = exam_and_text(word_model(tmp_path_factory.mktemp("ranks")))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def codes(folder: Path) -> torch.Tensor:
    with_codes = [module for module in lowbit.load(folder).modules() if isinstance(module, lowbit.QLinear)]
    return torch.cat([module.weight.codes().flatten() for module in with_codes])


def perplexity(model: nn.Module, folder: Path) -> float:
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)((folder / "text.txt").read_text())["input_ids"][:128]])
    with torch.no_grad():
        return float(model(ids, labels=ids).loss.double().exp())


@pytest.mark.sampled(count=1)
@pytest.mark.parametrize(
    ("recipe", "counts", "further"),
    [
        ("gptq(int3_g64)", (2, 3), ()),
        ("gptq(int3_g64)", (2,), ("--max-memory", "1GB")),
        ("gptq(int3_g64, asymmetric=true)", (2,), ()),
    ],
    ids=["in memory", "from disk", "beside the float model"],
)
def test_several_processes_make_what_one_makes(source, recipe, counts, further, tmp_path):
    settings = ("quantize", source, "-r", recipe, "--calibration", source / "text.txt", "--length", 24, "--rows", 20)
    alone = subprocess.run(
        [sys.executable, "-m", "lowbit", *map(str, (*settings, "-o", tmp_path / "1", *further))],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    expected = codes(tmp_path / "1")
    loss = perplexity(lowbit.load(tmp_path / "1"), source)
    for count in counts:
        done = under_torchrun(count, "-m", "lowbit", *settings, "-o", tmp_path / str(count), *further)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("21 of 23 layers quantized") == 1  # the first alone reports
        assert float((codes(tmp_path / str(count)) == expected).double().mean()) >= 0.9999
        assert perplexity(lowbit.load(tmp_path / str(count)), source) == pytest.approx(loss, rel=1e-4)
        one, other = (TensorFile(tmp_path / name / "model.safetensors") for name in ("1", str(count)))
        assert one.specs == other.specs
        one.close()
        other.close()


SPLIT = """
import sys, torch
from torch import distributed, nn
import lowbit
from tests.lowbit.calibration.test_calibrate import Experts
distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(Experts(), Experts())
x = torch.randn(40, 8)
x = x[x.sum(-1).argsort()]  # each expert's rows come to one process alone
bad = x.clone()
bad[-1, 0] = float("nan")
plan = lowbit.quantize_(model, "gptq(int3)", calibration=list(x.split(10)))
told = {layer.name: (layer.loss, layer.notes) for layer in plan.layers}
parts = [told, [module.weight.codes() for module in model.modules() if isinstance(module, lowbit.QLinear)]]
if distributed.get_rank() == 0:
    torch.save(parts, sys.argv[1])
try:
    lowbit.quantize_(nn.Sequential(Experts(), Experts()), "gptq(int3)", calibration=list(bad.split(10)))
except ValueError as error:
    print("raised", error, flush=True)
distributed.destroy_process_group()
"""


def test_layers_that_one_process_alone_hears_of_and_errors_of_one_are_everybody_s(tmp_path):
    script = tmp_path / "split.py"
    script.write_text(SPLIT)
    for count in (1, 2):
        done = under_torchrun(count, script, tmp_path / str(count))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("raised") == count, done.stdout
        assert done.stdout.count("batch 3: 1 of") == count
    (one, first), (two, second) = (torch.load(tmp_path / count) for count in ("1", "2"))
    assert one.keys() == two.keys()
    for name in one:
        assert one[name][1] == two[name][1]
        assert one[name][0] == pytest.approx(two[name][0])
    assert any(notes for _, notes in one.values())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
