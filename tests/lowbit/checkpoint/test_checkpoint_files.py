"""The files themselves: golden ones, the reader in the documentation, their size, and saves that are interrupted."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import lowbit
from lowbit import QLinear, QTensor
from lowbit.checkpoint.header import VERSION
from lowbit.checkpoint.tensor_file import TensorFile
from tests import ROOT
from tests.support import generate_golden, models

GOLDEN = sorted(path.parent for path in (ROOT / "tests/golden").glob("*/*/linear.npy"))
PRESENT = ROOT / f"tests/golden/version{VERSION}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- golden files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_golden_files_mean_what_they_meant(folder):
    rows = 5 if folder.name == "tied" else 3
    bias = folder.name not in ("tied", "activations")
    model = lowbit.load(folder, model=generate_golden.float_layers(rows, bias))
    for name in ("embedding", "linear"):
        found = model[name].weight.dequantize(torch.float32).numpy()
        np.testing.assert_array_equal(found, np.load(folder / f"{name}.npy"), strict=True)
    assert (model["linear"].weight is model["embedding"].weight) == (folder.name == "tied")
    assert (model["linear"].activation is None) == (folder.name != "activations")
    if bias:
        assert torch.equal(model["linear"].bias, (generate_golden.pattern(3) / 128).bfloat16())


def test_there_is_a_golden_folder_for_every_kind():
    assert {path.name for path in PRESENT.iterdir()} == {*generate_golden.SCHEMES, "tied", "activations", "sharded"}
    assert all(path.stat().st_size < 10_000 for path in PRESENT.rglob("*"))


def test_generating_them_again_gives_the_same_bytes(tmp_path):
    generate_golden.generate(tmp_path)
    for path in PRESENT.rglob("*.*"):
        assert (tmp_path / path.relative_to(PRESENT)).read_bytes() == path.read_bytes(), path


@pytest.fixture(scope="module")
def reader() -> dict:
    text = (ROOT / "docs/file-format.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line]) <= 40
    assert set(re.findall(r"^(?:import|from) (\w+)", block[1], re.MULTILINE)) == {"json", "numpy"}
    found: dict = {}
    exec(compile(block[1], "file-format.md", "exec"), found)
    return found


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("folder", sorted(PRESENT.iterdir()), ids=lambda folder: folder.name)
def test_the_reader_in_the_documentation_needs_numpy_alone(folder, reader):
    tensors: dict = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, found = reader["read"](path)
        tensors |= found
    for name in ("embedding", "linear"):
        numbers = reader["dequantize"](header, tensors, name)
        np.testing.assert_array_equal(numbers, np.load(folder / f"{name}.npy"), strict=True)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_reader_takes_experts_too(tmp_path, reader):
    model = nn.Module()
    for name in ("nvfp4", "int3"):
        setattr(model, name, nn.Parameter(QTensor.quantize(torch.randn(3, 4, 50), name), requires_grad=False))
    lowbit.save(model, tmp_path)
    for name in ("nvfp4", "int3"):
        numbers = reader["dequantize"](*reader["read"](tmp_path / "model.safetensors"), name)
        np.testing.assert_array_equal(numbers, getattr(model, name).dequantize(torch.float32).numpy())


def test_the_safetensors_library_and_this_one_read_each_other(tmp_path):
    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
        torch.complex64,
    )  # fmt: skip
    tensors = {str(dtype).replace(".", "_"): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    lowbit.save(model, tmp_path)
    theirs = safetensors.torch.load_file(tmp_path / "model.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"a": "b"})
    file = TensorFile(tmp_path / "theirs.safetensors")
    assert file.metadata == {"a": "b"}
    for name, tensor in tensors.items():
        for found in (theirs[name], file.read(name)):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    file.close()
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert json.loads(opened.metadata()["lowbit"])["version"] == VERSION


# ---- size ------------------------------------------------------------------------------------------------------


def test_int3_takes_what_it_says(tmp_path):
    torch.manual_seed(0)
    sizes = [(1024, 512), (512, 1408), (1408, 500), (768, 1000), (300, 2048)]
    model = nn.Sequential(*(nn.Linear(k, n, bias=False) for n, k in sizes))
    for i, layer in enumerate(model):
        model[i] = QLinear(QTensor.quantize(layer.weight, "int3"))
    lowbit.save(model, tmp_path)
    bits = 8 * (tmp_path / "model.safetensors").stat().st_size / sum(n * k for n, k in sizes)
    assert bits <= 3.35, bits  # 3 + (16 + 3) / 128, and what rows that end within a group and the header take


# ---- replacing a checkpoint ------------------------------------------------------------------------------------

SINGLE, SHARDED = 1 << 30, 100


def marked(value: float) -> nn.Module:
    """A model whose every tensor says which save it is from."""
    model = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    model[0] = QLinear(QTensor.quantize(model[0].weight, "int4"), model[0].bias)
    return model


def mark(folder: Path) -> int:
    """Which save the folder holds; fails where it is a mix."""
    model = lowbit.load(folder, model=nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 4), nn.LayerNorm(4)))
    found = {
        round(v) for p in [model[0].weight.dequantize(), model[0].bias, *model[1:].parameters()] for v in p.flatten().tolist()
    }
    assert len(found) == 1
    return found.pop()


class Interruption:
    """Calls ``strike`` at the n-th step of a save: a tensor, a sync, a rename, a removal."""

    STEPS = ((torch.Tensor, "contiguous"), (os, "fsync"), (os, "replace"), (os, "unlink"), (Path, "unlink"))

    def __init__(self, patch, nth: int, strike) -> None:
        self.left, self.strike = nth, strike
        for home, name in self.STEPS:
            patch(home, name, self.counted(getattr(home, name)))

    def counted(self, function):
        def step(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                self.strike()
            return function(*args, **kwargs)

        return step


LIMITS = [(a, b) for a in (SINGLE, SHARDED) for b in (SINGLE, SHARDED)]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(("old", "new"), LIMITS)
def test_a_save_that_fails_leaves_one_whole_set(tmp_path, old, new, error):
    (tmp_path / "tokenizer.json").write_text("{}")

    def strike() -> None:
        raise error

    outcomes, said = [], ""
    for nth in range(1, 200):
        lowbit.save(marked(1), tmp_path, max_shard_bytes=old)
        with pytest.MonkeyPatch.context() as patch:
            interruption = Interruption(patch.setattr, nth, strike)
            try:
                lowbit.save(marked(2), tmp_path, max_shard_bytes=new)
            except type(error) as caught:
                said = str(caught)
            done = interruption.left > 0
        outcomes.append(mark(tmp_path))
        assert not [name for name in names(tmp_path) if name.startswith(".")]
        if nth == 1 and isinstance(error, OSError):
            assert re.search(r"No space left on device.*\.safetensors", said)
        if done:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes[0] == 1
    assert outcomes[-1] == 2
    assert outcomes.count(1) > 8
    expected = ["model.safetensors", "tokenizer.json"]
    assert new == SHARDED or names(tmp_path) == expected


def kill_at_every_step(root: str) -> None:
    """A copy of each folder under ``root``, saved to by a process that is killed at the n-th step."""
    import signal

    torch.set_num_threads(1)
    for folder in sorted(Path(root).iterdir()):
        limit = int(folder.name.rpartition("-")[2])
        for nth in range(1, 200):
            target = folder.with_name(f"{folder.name}@{nth}")
            shutil.copytree(folder, target)
            child = os.fork()
            if child == 0:
                Interruption(setattr, nth, lambda: os.kill(os.getpid(), signal.SIGKILL))
                lowbit.save(marked(2), target, max_shard_bytes=limit)
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                break


@pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")
def test_a_save_that_is_killed_leaves_one_whole_set(tmp_path):
    for old, new in LIMITS:
        lowbit.save(marked(1), tmp_path / f"{old}-{new}", max_shard_bytes=old)
    code = f"from tests.lowbit.checkpoint import test_checkpoint_files as t; t.kill_at_every_step({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    for old, new in LIMITS:
        copies = list(tmp_path.glob(f"{old}-{new}@*"))
        outcomes = [mark(path) for path in sorted(copies, key=lambda path: int(path.name.rpartition("@")[2]))]
        assert outcomes == sorted(outcomes)
        assert (outcomes[0], outcomes[-1]) == (1, 2)
        assert outcomes.count(1) > 8
        for path in copies:  # the next save clears away whatever the killed one left
            lowbit.save(marked(3), path)
            assert names(path) == ["model.safetensors"]


def test_names_of_shards(tmp_path):
    lowbit.save(marked(1), tmp_path, max_shard_bytes=SHARDED)
    index = "model.safetensors.index.json"
    first = names(tmp_path)
    count = len(first) - 1
    assert count > 1
    assert first == sorted([*(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)), index])
    content = json.loads((tmp_path / index).read_text())
    assert content["metadata"]["total_size"] == sum(spec.nbytes for _, spec in _specs(tmp_path))
    assert set(content["weight_map"]) == {name for name, _ in _specs(tmp_path)}
    lowbit.save(marked(2), tmp_path, max_shard_bytes=SHARDED)
    assert names(tmp_path) == sorted([*(f"model-2-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)), index])
    assert set(json.loads((tmp_path / index).read_text())["weight_map"].values()) == set(names(tmp_path)) - {index}
    lowbit.save(marked(3), tmp_path, max_shard_bytes=SHARDED)
    assert names(tmp_path) == first
    lowbit.save(marked(4), tmp_path, max_shard_bytes=1)  # a file for each tensor
    assert len(names(tmp_path)) == 1 + len(content["weight_map"])
    assert mark(tmp_path) == 4


def test_one_file_counts_before_an_index(tmp_path):
    """As in transformers; and the next save removes what did not count, under the names of every version."""
    lowbit.save(marked(1), tmp_path / "sharded", max_shard_bytes=SHARDED)
    lowbit.save(marked(2), tmp_path / "single")
    shutil.copytree(tmp_path / "sharded", tmp_path / "single", dirs_exist_ok=True)
    (tmp_path / "single" / "model-00001-of-00002-2.safetensors").write_bytes(b"")
    assert mark(tmp_path / "single") == 2
    lowbit.save(marked(3), tmp_path / "single")
    assert names(tmp_path / "single") == ["model.safetensors"]


def _specs(folder: Path) -> list:
    found = []
    for path in folder.glob("*.safetensors"):
        file = TensorFile(path)
        found += list(file.specs.items())
        file.close()
    return found


def test_a_full_disk_is_named_whatever_is_being_written(tmp_path, monkeypatch):
    model = models.llama()
    lowbit.save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model.config.__class__, "save_pretrained", lambda config, folder: full(folder))
    with pytest.raises(OSError, match=f"could not write the checkpoint: No space left on device: '{tmp_path}") as caught:
        lowbit.save(model, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        lowbit.save(marked(1), tmp_path / "file")


def test_what_is_no_model_and_no_device_is_said_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
        lowbit.load(tmp_path, model=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device 'abacus' cannot be used here"):
        lowbit.load(tmp_path, device="abacus")
