"""Float models whose files are not whole: every way in refuses them with the names, and takes what is new by design."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.modules import module as torch_module

import lowbit
from lowbit import CheckpointError
from lowbit.command import run
from lowbit.pretrained.float_folder import QuantizedError, outline_of
from tests.ecosystem import test_architectures as architectures
from tests.support import strategies  # noqa: F401 - its hypothesis profile
from tests.support.models import tokens

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def altered(whole: Path, folder: Path, edit: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """A copy of ``whole`` with other tensors, and with other settings in config.json."""
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in edit(load_file(whole / FILE)).items()}
    save_file(tensors, folder / FILE, {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **config}))
    return folder


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def projections(make: Callable[[str, Tensor], Tensors]) -> Callable[[Tensors], Tensors]:
    """Other tensors in place of each linear layer's weight but the head's."""

    def edit(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            found |= make(name, tensor) if "proj" in name else {name: tensor}
        return found

    return edit


# ---- every way in ------------------------------------------------------------------------------------------------


def arrived(kind: Any, folder: Path, recipe: Any = "int4", **options: Any) -> Any:
    return kind.from_pretrained(folder, quantization_config=lowbit.Config(recipe), **options)


def commands(model: Path, whole: Path, out: Path) -> dict[str, list[Any]]:
    text = ["--calibration", whole / "text.txt", "--rows", 1]
    return {
        "quantize": ["quantize", model, "-r", "int4_g32", "-o", out],
        "quantize from disk": ["quantize", model, "-r", "int4_g32", "-o", out, *text, "--max-memory", "1GB"],
        "plan": ["plan", model, "-r", "int4_g32"],
        "eval": ["eval", model, "-r", "int8", "--data", whole, "--tasks", "mmlu", "--limit", 1],
        "eval alone": ["eval", model, "-r", "", "--data", whole, "--tasks", "mmlu", "--limit", 1],
        "bench": ["bench", "generate", model, "--recipes", "int8", "--prompt", 4, "--context", 4, "--steps", 1, "--repeats", 1],
        "bench alone": ["bench", "generate", model, "--recipes", "", "--prompt", 4, "--context", 4, "--steps", 1, "--repeats", 1],
        "sensitivity": ["sensitivity", model, "-s", "int4_g32", *text, "--compared", 1],
        "tune": ["tune", model, "--device", "cpu"],
    }


WAYS = (*commands(Path(), Path(), Path()), "doctor", "quantize_folder", "Config")


def refusal(way: str, model: Path, whole: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """How ``way`` ends, and the one line that it says."""
    if way == "doctor":
        if not (out / "quantized").exists():
            assert run(["quantize", str(whole), "-r", "int8", "-o", str(out / "quantized")]) == 0
        arguments: list[Any] = ["doctor", out / "quantized", model]
    elif way in ("quantize_folder", "Config"):
        calls = {
            "Config": lambda: arrived(transformers.AutoModelForCausalLM, model),
            "quantize_folder": lambda: lowbit.quantize_folder(model, out / "out", "int4", calibration=tokens(1, 8) % 48),
        }
        with pytest.raises((CheckpointError, QuantizedError)) as found:
            calls[way]()
        said, code = str(found.value), 2 if isinstance(found.value, QuantizedError) else 1
        assert not torch_module._global_parameter_registration_hooks
        assert "\n" not in said
        return code, said
    else:
        arguments = commands(model, whole, out / "out")[way]
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert not (out / "out").exists()
    return code, line


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_refuses_a_model_that_lacks_a_tensor(way, whole, tmp_path, capsys):
    model = altered(whole, tmp_path / "model", without(UP, "model.norm.weight"))
    code, said = refusal(way, model, whole, tmp_path, capsys)
    assert code == 1
    assert f"{model}: " in said
    assert f"missing from the files: {UP}, model.norm.weight" in said


def _codes(kind: torch.dtype, **scales: Tensor) -> Callable[[Tensors], Tensors]:
    return projections(lambda n, t: {n: t.to(kind), **{n.replace("weight", leaf): s.clone() for leaf, s in scales.items()}})


def _leaves(kind: torch.dtype, *leaves: str) -> Callable[[Tensors], Tensors]:
    return projections(lambda name, _: {name.replace("weight", leaf): torch.zeros(4, dtype=kind) for leaf in leaves})


DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], int, str]] = {
    "the head": (without("lm_head.weight"), 1, "missing from the files: lm_head.weight"),
    "the embedding": (without("model.embed_tokens.weight"), 1, "missing from the files: model.embed_tokens.weight"),
    "foreign names": (renamed("model.", "net."), 1, "unknown to the model: net.embed_tokens.weight"),
    "foreign names of layers": (renamed("model.layers", "transformer.h"), 1, "unknown to the model: transformer.h.0"),
    "a wrong shape": (lambda t: {**t, UP: t[UP][1:]}, 1, f"of another shape in the files: {UP} [47, 32] for [48, 32]"),
    "transposed": (lambda t: {**t, UP: t[UP].t()}, 1, f"{UP} [32, 48] for [48, 32]"),
    "a bias too many": (
        lambda t: {**t, UP.replace("weight", "bias"): torch.zeros(48)},
        1,
        f"unknown to the model: {UP.replace('weight', 'bias')}",
    ),
    "a layer too many": (
        lambda t: t | {n.replace("layers.0", "layers.1"): v.clone() for n, v in t.items()},
        1,
        "unknown to the model: model.layers.1.input_layernorm",
    ),
    "a tensor that nobody knows": (lambda t: {**t, "extra.weight": torch.zeros(3)}, 1, "unknown to the model: extra.weight"),
    "fp8 codes and scales of blocks": (
        _codes(torch.float8_e4m3fn, weight_scale_inv=torch.ones(1, 1)),
        2,
        "already, as fp8 in blocks: its files hold model",
    ),
    "fp8 codes and scales": (_codes(torch.float8_e4m3fn, weight_scale=torch.ones(1)), 2, "already, as fp8 or int8 with scales"),
    "int8 codes and nothing": (_codes(torch.int8), 2, "already, as integers: its files hold model.layers.0.mlp.down_proj.weight"),
    "int8 of bitsandbytes": (_codes(torch.int8, SCB=torch.ones(4)), 2, "already, as bitsandbytes (8 bits)"),
    "gptq": (_leaves(torch.int32, "qweight", "qzeros", "scales", "g_idx"), 2, "already, as gptq or awq"),
    "mxfp4": (_leaves(torch.uint8, "weight_blocks", "weight_scales"), 2, "already, as mxfp4:"),
    "compressed-tensors": (_leaves(torch.int32, "weight_packed", "weight_scale"), 2, "already, as compressed-tensors:"),
    "hqq": (_leaves(torch.uint8, "W_q", "meta"), 2, "already, as hqq:"),
    "lowbit": (_leaves(torch.uint8, "packed", "scale"), 2, "already, as lowbit:"),
}


@pytest.mark.parametrize("way", ["plan", "quantize from disk", "Config"])
@pytest.mark.parametrize(("edit", "code", "words"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_whole_is_named(way, edit, code, words, whole, tmp_path, capsys):
    found, said = refusal(way, altered(whole, tmp_path / "model", edit), whole, tmp_path, capsys)
    assert words in said
    assert found == code


def _sharded(whole: Path, folder: Path) -> Path:
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    transformers.LlamaForCausalLM.from_pretrained(whole, dtype="auto").save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def _index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def _lose_a_shard(folder: Path) -> str:
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    return f"{INDEX} lists {lost.name}, and the folder lacks it"


def _cut_a_shard(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path}: "


def _list_too_much(folder: Path) -> str:
    _index(folder, lambda places: places.update({"model.layers.0.mlp.gone.weight": next(iter(places.values()))}))
    return "tensor model.layers.0.mlp.gone.weight is listed there by the index, and none of the files holds it"


def _list_elsewhere(folder: Path) -> str:
    homes = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(name for name in homes.values() if name != homes[UP])
    _index(folder, lambda places: places.update({UP: other}))
    return f"{folder / other}: tensor {UP} is listed there by the index, and {homes[UP]} holds it"


def _outside(folder: Path) -> str:
    _index(folder, lambda places: places.update({UP: "../model.safetensors"}))
    return "must be a plain *.safetensors name"


@pytest.mark.parametrize("way", ["plan", "quantize", "quantize from disk"])
@pytest.mark.parametrize("damage", [_lose_a_shard, _cut_a_shard, _list_too_much, _list_elsewhere, _outside])
def test_shards_and_their_index(way, damage, whole, tmp_path, capsys):
    folder = _sharded(whole, tmp_path / "model")
    words = damage(folder)
    code, said = refusal(way, folder, whole, tmp_path, capsys)
    assert words in said
    assert code == 1


def test_pickled_weights_are_compared_as_well(whole, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(whole / FILE)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert run(["plan", str(folder)]) == 0
    del tensors[UP]
    torch.save(tensors, folder / "pytorch_model.bin")
    code, said = refusal("quantize", folder, whole, tmp_path, capsys)
    assert (code, UP in said) == (1, True)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert "pytorch_model.bin: cannot be read" in refusal("plan", folder, whole, tmp_path, capsys)[1]


# ---- architectures ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture, which is written once."""
    home = tmp_path_factory.mktemp("architectures")

    def folder(name: str) -> Path:
        if not (home / name).is_dir():
            architectures.build(name).save_pretrained(home / name)
        return home / name

    return folder


@pytest.mark.parametrize("name", architectures.MODELS)
def test_whole_folders_are_taken_without_a_word(name, saved):
    model, remarks = outline_of(saved(name))
    assert remarks == []
    assert type(model).__name__ == architectures.MODELS[name][0]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@given(data=st.data())
@settings(max_examples=20)
def test_any_tensor_that_is_changed_is_told(saved, tmp_path_factory, data):
    architecture = data.draw(st.sampled_from(sorted(architectures.MODELS)))
    source, model = saved(architecture), getattr(transformers, architectures.MODELS[architecture][0])
    tensors = load_file(source / FILE)
    # Some names transformers itself does without, or passes over.
    ignored = [*(model._keys_to_ignore_on_load_missing or ()), *(model._keys_to_ignore_on_load_unexpected or ())]
    names = [name for name in tensors if not any(re.search(pattern, name) for pattern in ignored)]
    name = data.draw(st.sampled_from(sorted(names)))
    kind = data.draw(st.sampled_from(("missing", "renamed", "shape", "more")))
    tensor = tensors.pop(name) if kind != "more" else tensors[name].clone()
    if kind != "missing":
        tensors[name if kind == "shape" else f"{name}_x"] = tensor.reshape(-1)[:-1].clone() if kind == "shape" else tensor
    folder = tmp_path_factory.mktemp("changed")
    shutil.copy(source / "config.json", folder)
    save_file(tensors, folder / FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name.split(".")[-1][:4]) as found:
        outline_of(folder)
    assert str(folder) in str(found.value)
