"""A package from elsewhere adds a format, a scheme, a rounder, a rewrite, a kernel and a class of modules by an entry point."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import lowbit
from lowbit import plugins
from lowbit.algorithms import Rounder
from lowbit.rewrites import Method
from tests import ROOT
from tests.support.models import word_model

PLUGIN = ROOT / "tests" / "plugin"

USED = """
import json, sys, torch
import lowbit
assert "fivebit_plugin" not in sys.modules  # importing lowbit loads no plug-in
model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8))
plan = lowbit.quantize_(model, "shrink(dithered(tiny_float, seed=3), factor=1.0)")
import fivebit_plugin
own = torch.nn.Sequential(fivebit_plugin.Dense(64, 32))
lowbit.quantize_(own, "int4_g32")
x = torch.randn(6, 64)
with lowbit.trace_kernels() as trace:
    y = model(x)
lowbit.save(model, sys.argv[1])
print(json.dumps({
    "scheme": str(model[0].scheme), "notes": [*plan.notes, *plan.layers[0].notes], "kernels": sorted(trace.kernels()),
    "dense": type(own[0]).__name__, "error": float((y - torch.nn.functional.linear(
        torch.relu(torch.nn.functional.linear(x, model[0].weight.dequantize(), model[0].bias)),
        model[2].weight.dequantize(), model[2].bias)).abs().max()),
}))
"""
LOADED = (
    "import sys, torch, lowbit; from safetensors.torch import load_file; print(lowbit.QTensor); m = lowbit.load(sys.argv[1], \
torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8))); print(m[0].scheme)"
)


def install(package: Path, site: Path) -> dict[str, str]:
    """The environment of a process in which the wheel of ``package`` is installed: what pip writes, in a folder of its own."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(package)], check=True, capture_output=True)
    paths = [str(site), str(PLUGIN.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    source = shutil.copytree(PLUGIN, tmp_path_factory.mktemp("source") / "plugin")
    return install(source, tmp_path_factory.mktemp("site"))


def python(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


def test_everything_that_a_package_adds_works(installed: dict[str, str], tmp_path: Path) -> None:
    done = python(installed, "-c", USED, tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["scheme"] == "fp5_e1m3:g32:bf16"
    assert found["notes"] == ["shrink(factor=1.0): weights times 1.0", "dithered with seed 3"]
    assert "fivebit_gemm" in found["kernels"]
    assert found["dense"] == "QLinear"
    assert found["error"] < 1e-5
    again = python(installed, "-c", LOADED, tmp_path / "saved")  # a file names the format, which brings the plug-in
    assert again.stdout.splitlines()[-1] == "fp5_e1m3:g32:bf16", again.stderr
    without = python({**installed, "PYTHONPATH": str(PLUGIN.parent.parent)}, "-c", LOADED, tmp_path / "saved")
    assert "is not in lowbit.FORMATS: install the plug-in that brings it" in without.stderr


def test_the_command_line_takes_it(installed: dict[str, str], tmp_path: Path) -> None:
    source = word_model(tmp_path / "model")
    done = python(installed, "-m", "lowbit", "quantize", source, "-r", "dithered(tiny_float)", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "fp5_e1m3:g32:bf16" in python(installed, "-m", "lowbit", "inspect", tmp_path / "out").stdout
    assert "tiny_float" in python(installed, "-m", "lowbit", "list", "schemes").stdout


def test_the_package_that_the_site_shows(tmp_path: Path) -> None:
    """docs/extending.md: its two files, with the rounder of the page's first example, and what it then says of them."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].split("lowbit.register_rounder")[0]
    project, init = re.findall(r"```text\n# pyproject.toml\n(.*?)\n# my_rounder/__init__.py.*?\n(.*?)```", page, re.DOTALL)[0]
    package = tmp_path / "my-rounder" / "my_rounder"
    package.mkdir(parents=True)
    (package.parent / "pyproject.toml").write_text(project)
    (package / "__init__.py").write_text(example + init)
    environment = install(package.parent, tmp_path / "site")
    assert "dithered" in python(environment, "-m", "lowbit", "list", "methods").stdout
    source = word_model(tmp_path / "model")
    done = python(environment, "-m", "lowbit", "quantize", source, "--recipe", "dithered(int4, seed=3)", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    # Where the plug-in is not installed the folder loads nevertheless.
    load = "import lowbit, sys; from transformers import AutoModelForCausalLM; \
print(AutoModelForCausalLM.from_pretrained(sys.argv[1]).hf_quantizer.quantization_config.unread.reason)"
    again = python({**environment, "PYTHONPATH": str(ROOT)}, "-c", load, tmp_path / "out")
    assert "no rounder named 'dithered'" in again.stdout, again.stderr


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nbad = no_such_module:register\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PLUGIN.parent.parent)])}
    done = python(environment, "-m", "lowbit", "list", "schemes")
    assert done.returncode == 1
    assert "the plug-in bad of broken 1.2 (no_such_module:register) cannot be loaded" in done.stderr
    assert "update or uninstall that package" in done.stderr


class Other(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda: lowbit.register_scheme("int4", "int8:row:bf16"), "is the library's own and stays"),
        (lambda: lowbit.register_scheme("a b", "int8:row:bf16"), "named by letters, digits and _"),
        (lambda: lowbit.register_scheme("mine", "int99:row:bf16"), "no format named 'int99'"),
        (lambda: lowbit.register_rounder("rtn", Rounder(lambda *a: None, False)), "is the library's own and stays"),
        (lambda: lowbit.register_rounder("awq", Rounder(lambda *a: None, False)), "there is a rewrite named 'awq'"),
        (lambda: lowbit.register_rewrite("gptq", Method(lambda *a: None, "model")), "there is a rounder named 'gptq'"),
        (lambda: lowbit.register_format(lowbit.Int("int4", 5, True)), "own"),
        (lambda: lowbit.register_module(Other, "matrix"), "one of the kinds linear, conv1d, embedding"),
    ],
)
def test_what_cannot_be_added_says_why(add, message) -> None:
    with pytest.raises(ValueError, match=message):
        add()


def test_a_module_of_a_registered_class_is_quantized_and_those_below_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.layers import MODULES

    class Below(Other):
        def forward(self, input):
            return super().forward(input) * 2

    model = nn.Sequential(Other(64, 8), Below(64, 8))
    assert not lowbit.plan(model, "int4_g32").quantized
    monkeypatch.setitem(MODULES, Other, "linear")
    assert [layer.name for layer in lowbit.plan(model, "int4_g32").quantized] == ["0"]
