"""accelerate: offloading, dispatching, device maps and hooks of models that are quantized before or afterwards."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
)
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import align_module_device, compute_module_sizes, get_balanced_memory, infer_auto_device_map
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import QLinear, QTensor
from tests.support import models

SCHEMES = ["int4", "int3", "nf4", "nvfp4", "mxfp4", "int8_dynamic_activation_int8_weight"]
IDS = torch.arange(6)[None]
CPU = torch.device("cpu")
MIXED = {
    "model.embed_tokens": "cpu", "lm_head": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu",
    "model.norm": "disk", "model.rotary_emb": "cpu",
}  # fmt: skip

works_with = pytest.mark.works_with


def recipe(scheme: str) -> dict[str, str]:
    return {"*embed_tokens": "int4", "lm_head": "int4", "*": scheme}


def quantized(scheme: str, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    model = models.llama(tied, dtype)
    lowbit.quantize_(model, recipe(scheme))
    return model.requires_grad_(False)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def held(model: nn.Module) -> int:
    """Bytes of what ``model`` holds in memory."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if not t.is_meta)


def by_hooks(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Ways to place a model, each with a folder of its own."""
    return {
        "cpu_offload": lambda m: cpu_offload(m, CPU),
        "disk_offload": lambda m: disk_offload(m, str(folder / "disk"), CPU),
        "dispatch_model": lambda m: dispatch_model(m, MIXED, offload_dir=str(folder / "mixed")),
        "forced hooks": lambda m: dispatch_model(m, {"": "cpu"}, force_hooks=True),
    }


WAYS = ["cpu_offload", "disk_offload", "dispatch_model", "forced hooks"]


@works_with("accelerate", "cpu_offload, disk_offload, dispatch_model")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", WAYS)
def test_a_quantized_model_is_placed(way: str, scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    wanted, weight = logits(model), model.model.layers[0].mlp.up_proj.weight.clone()
    placed = by_hooks(tmp_path)[way](model)
    for _ in range(2):
        assert torch.equal(logits(placed), wanted)
    layer = placed.model.layers[0].mlp.up_proj
    assert isinstance(layer, QLinear)
    assert layer.weight.is_meta == (way != "forced hooks")
    with align_module_device(layer):
        assert torch.equal(layer.weight, weight)
    remove_hook_from_submodules(placed)
    assert not any(p.is_meta for p in placed.parameters())
    assert torch.equal(layer.weight, weight)
    assert torch.equal(logits(placed), wanted)


@works_with("accelerate", "disk_offload keeps codes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_offloaded_to_disk_is_codes(dtype: torch.dtype, tmp_path: Path) -> None:
    """In files of about the size of the codes, which another model of the same kind reads, too."""
    model = quantized("int3", False, dtype)
    wanted, quant = logits(model), [(n, p) for n, p in model.named_parameters() if isinstance(p, QTensor)]
    sizes, again = {name: weight.nbytes for name, weight in quant}, copy.deepcopy(model)
    disk_offload(model, str(tmp_path), CPU)
    index = json.loads((tmp_path / "index.json").read_text())
    for name, size in sizes.items():
        (file,) = [path for path in tmp_path.iterdir() if path.name.startswith(f"{name}.")]
        assert size < file.stat().st_size < size + 4096, name
        assert index[name]["shape"] == list(again.get_parameter(name).shape)
    for _, p in (found for found in again.named_parameters() if isinstance(found[1], QTensor)):
        p.data = torch.zeros_like(p.dequantize())
    assert torch.equal(logits(disk_offload(again, str(tmp_path), CPU)), wanted)
    path = tmp_path / "model.layers.0.mlp.up_proj.weight.pt"
    path.unlink()
    with pytest.raises(lowbit.CheckpointError, match=r"up_proj\.weight\.pt: the weight that was offloaded there cannot be read"):
        logits(again)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """accelerate takes what lies there for the weights of the model, and writes none."""
    disk_offload(models.llama(), str(tmp_path / "floats"), CPU)
    disk_offload(quantized("int4"), str(tmp_path / "codes"), CPU)
    for model, folder, words in (
        (quantized("int4"), "floats", "as floats, and here it is uint4:g128"),
        (models.llama(), "codes", "as uint4:g128:zint:bf16, and here it is floats"),
        (quantized("nf4"), "codes", "as uint4:g128:zint:bf16, and here it is nf4"),
    ):
        with pytest.raises(ValueError, match=rf"of an earlier model {words}.*: give an empty folder"):
            disk_offload(model, str(tmp_path / folder), CPU)
        with pytest.raises(ValueError, match="give an empty folder"):
            dispatch_model(model, {"": "disk"}, offload_dir=str(tmp_path / folder))
    wanted = logits(quantized("int4"))
    assert torch.equal(logits(disk_offload(quantized("int4"), str(tmp_path / "codes"), CPU)), wanted)
    disk_offload(models.llama(), str(tmp_path / "floats"), CPU)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_come_back_as_their_kernels_read_them(scheme: str, tmp_path: Path) -> None:
    """In sizes of which a CPU has a layout of its own."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 96)), torch.randn(3, 512)
    lowbit.quantize_(model, scheme)
    model.requires_grad_(False)
    wanted, layout = model(x), model[0].weight.byte_layout
    for way in ("cpu_offload", "disk_offload"):
        placed = by_hooks(tmp_path)[way](copy.deepcopy(model))
        assert placed[0].weight.is_meta
        assert placed[0].weight.byte_layout == "canonical"
        assert torch.equal(placed(x), wanted)
        with align_module_device(placed[0]):
            assert placed[0].weight.byte_layout == layout


@works_with("accelerate", "cpu_offload_with_hook")
def test_a_whole_model_comes_and_goes() -> None:
    model = quantized("int4")
    wanted = logits(model)
    model, hook = cpu_offload_with_hook(model, CPU)
    assert torch.equal(logits(model), wanted)
    hook.offload()
    hook.remove()
    assert torch.equal(logits(model), wanted)


# ---- sizes ---------------------------------------------------------------------------------------------------------


@works_with("accelerate", "infer_auto_device_map with true sizes")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_device_maps_are_made_of_what_is_stored(scheme: str) -> None:
    model = quantized(scheme, tied=False)
    sizes = compute_module_sizes(model)
    assert sizes[""] == held(model)
    for name in ("model.layers.0", "model.layers.1.mlp.down_proj", "model.embed_tokens"):
        assert sizes[name] == held(model.get_submodule(name))
    assert compute_module_sizes(model.to("meta"))[""] == sizes[""]
    assert compute_module_sizes(model, dtype=torch.float16)[""] < sizes[""]  # norms and buffers
    assert compute_module_sizes(model, special_dtypes={"lm_head.weight": torch.float32})["lm_head"] == 4 * 96 * 64
    block = sizes["model.layers.0"]
    room = sizes["model.embed_tokens"] + 2 * block  # of which one block is for those that come from disk
    found = infer_auto_device_map(model, {"cpu": room}, no_split_module_classes=["LlamaDecoderLayer"])
    assert found["model.layers.0"] == "cpu"
    assert found["model.layers.1"] == "disk"
    assert sum(get_balanced_memory(model, {"cpu": 10 * sizes[""]}).values()) == 10 * sizes[""]


def test_sizes_of_float_models_are_as_ever() -> None:
    model = models.llama()
    assert compute_module_sizes(model)[""] == held(model)
    assert compute_module_sizes(model, torch.float16)[""] == sum(t.numel() * 2 for t in (*model.parameters(), *model.buffers()))
    assert compute_module_sizes(quantized("int4"), buffers_only=True)[""] == sum(b.nbytes for b in model.buffers())


# ---- hooks ---------------------------------------------------------------------------------------------------------


@works_with("accelerate", "quantize_ on a model that carries hooks, and saving it")
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("scheme", ["int4", "nvfp4", "int8_dynamic_activation_int8_weight"])
@pytest.mark.parametrize("way", WAYS)
def test_a_placed_model_is_quantized_where_it_is(way: str, scheme: str, tmp_path: Path) -> None:
    tied = way != "disk_offload"  # which writes a tied weight twice
    placed = by_hooks(tmp_path)[way](models.llama(tied))
    hooked = {name for name, module in placed.named_modules() if hasattr(module, "_hf_hook")}
    meta = {name for name, p in placed.named_parameters() if p.is_meta}
    before = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    lowbit.quantize_(placed, recipe(scheme))
    assert {name for name, module in placed.named_modules() if hasattr(module, "_hf_hook")} == hooked
    assert {name for name, p in placed.named_parameters() if p.is_meta} == meta
    assert isinstance(placed.model.layers[0].mlp.up_proj.weight, QTensor)
    wanted = logits(quantized(scheme, tied))
    for _ in range(2):
        assert torch.equal(logits(placed), wanted)
    after = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    assert after < 0.6 * before or not before  # floats are gone from the folder
    placed.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), wanted)
    remove_hook_from_submodules(placed)
    assert torch.equal(logits(placed), wanted)


@pytest.mark.parametrize("way", ["disk_offload", "dispatch_model"])
@pytest.mark.parametrize("what", ["gptq(int4)", "int8_static_activation_int8_weight"])
def test_rounders_with_data_meet_placed_models(way: str, what: str, tmp_path: Path) -> None:
    alone, data = models.llama(), models.tokens(4, 12)
    lowbit.quantize_(alone, what, calibration=data)
    placed = by_hooks(tmp_path)[way](models.llama())
    lowbit.quantize_(placed, what, calibration=data)
    assert torch.equal(logits(placed), logits(alone))


def test_rewrites_of_offloaded_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    placed = cpu_offload(models.llama(), CPU)
    wanted = logits(placed)
    with pytest.raises(ValueError, match=r"awq changes weights in memory.*remove_hook_from_submodules"):
        lowbit.quantize_(placed, lowbit.awq("int4"), calibration=models.tokens(4, 12))
    assert torch.equal(logits(placed), wanted)
    remove_hook_from_submodules(placed)
    lowbit.quantize_(placed, lowbit.awq("int4"), calibration=models.tokens(4, 12))


def test_a_hook_over_somebody_elses_forward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].forward = lambda x: 2 * x  # type: ignore[method-assign]
    accelerate.hooks.add_hook_to_module(model[0], accelerate.hooks.AlignDevicesHook(CPU))
    carried = lowbit.quantize_(model, "int4")
    assert [layer.name for layer in carried.quantized] == ["1"]
    assert "hooks" in carried.skipped[0].reason
