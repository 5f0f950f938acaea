"""accelerate: folders that are loaded and dispatched, and Accelerator's states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import (
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.utils import compute_module_sizes
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import lowbit
from lowbit import QLinear, QTensor
from tests.ecosystem.test_accelerate import MIXED, SCHEMES, by_hooks, held, logits, quantized, works_with
from tests.support import models

# ---- folders -------------------------------------------------------------------------------------------------------

MAPS: dict[str, Any] = {"none": None, "auto": "auto", "cpu": {"": "cpu"}, "disk": {"": "disk"}, "mixed": MIXED}


@works_with("accelerate", "load_checkpoint_and_dispatch, init_empty_weights")
@pytest.mark.parametrize("scheme", ["nvfp4", "int8_dynamic_activation_int8_weight"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_folder_is_loaded_and_dispatched(name: str, scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme, False)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "codes", max_shard_size="10KB" if name == "mixed" else "1GB")
    with init_empty_weights():
        empty = models.llama(False)
    options = {"device_map": MAPS[name], "offload_folder": str(tmp_path / "disk")}
    found = load_checkpoint_and_dispatch(empty, tmp_path / "codes", **options)
    assert torch.equal(logits(found), wanted)
    assert isinstance(found.model.layers[0].mlp.up_proj, QLinear)
    assert found.model.layers[0].mlp.up_proj.weight.is_meta == (name in ("disk", "mixed"))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), wanted)


@works_with("accelerate", "load_checkpoint_and_dispatch, init_empty_weights")
def test_ways_to_name_a_folder_and_what_is_in_the_way(tmp_path: Path) -> None:
    model = quantized("int4")
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    models.llama().save_pretrained(tmp_path / "float")
    for checkpoint in (str(tmp_path), tmp_path / "model.safetensors"):
        with init_empty_weights():
            empty = models.llama()
        load_checkpoint_in_model(empty, checkpoint, device_map={"": "cpu"})
        assert torch.equal(logits(empty), wanted)
        assert empty.lm_head.weight is empty.model.embed_tokens.weight
    with init_empty_weights():
        empty = models.llama()
    assert torch.equal(logits(lowbit.load(tmp_path, empty)), wanted)
    half = models.llama()
    load_checkpoint_in_model(half, tmp_path, dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    plain = models.llama()
    load_checkpoint_in_model(plain, tmp_path / "float", device_map={"": "cpu"})
    assert torch.equal(logits(plain), logits(models.llama()))
    with pytest.raises(ValueError, match="give offload_folder="):
        load_checkpoint_in_model(models.llama(), tmp_path, device_map={"": "disk"})
    with pytest.raises(ValueError, match="device_map has no device"):
        load_checkpoint_in_model(models.llama(), tmp_path, device_map={"model": "cpu"})
    with pytest.raises(lowbit.CheckpointError, match=r"in the model|the model has"):
        load_checkpoint_in_model(models.gpt2(), tmp_path, device_map={"": "cpu"})


def test_maps_of_folders_are_made_of_codes(tmp_path: Path) -> None:
    model = quantized("int4", False)
    model.save_pretrained(tmp_path)
    room = compute_module_sizes(model)[""] * 3 // 2  # enough for codes, and for a small part of the floats
    with init_empty_weights():
        empty = models.llama(False)
    found = load_checkpoint_and_dispatch(empty, tmp_path, device_map="sequential", max_memory={"cpu": room})
    assert not any(p.is_meta for p in found.parameters())


# ---- Accelerator ---------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A head that is trained, over a quantized model."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.body = quantized(scheme)
        torch.manual_seed(3)
        self.head = nn.Linear(96, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids).logits[:, -1])


@works_with("accelerate", "Accelerator: prepare, backward, save_state, load_state")
@pytest.mark.parametrize(("scheme", "safe"), [*((scheme, True) for scheme in SCHEMES), ("int4", False)])
def test_a_head_is_trained_and_its_state_saved(scheme: str, safe: bool, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = Classifier(scheme)
    optimizer = torch.optim.AdamW(model.head.parameters(), 0.1)
    data = torch.utils.data.DataLoader(models.tokens(8, 6), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    def steps() -> list[float]:
        found = []
        for ids in data:
            loss = model(ids).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    assert steps()[1] < steps()[0]
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    wanted = steps()
    weight = model.body.model.layers[0].mlp.up_proj.weight
    before = weight.clone()
    weight.data += 0.1
    accelerator.load_state(str(tmp_path))
    assert torch.equal(weight, before)
    assert model.body.lm_head.weight is model.body.model.embed_tokens.weight
    assert steps() == wanted
    accelerator.free_memory()


@works_with("accelerate", "experts in one parameter")
@pytest.mark.parametrize("scheme", ["int4", "nvfp4"])
def test_experts_in_one_parameter(scheme: str, tmp_path: Path) -> None:
    def mixtral() -> Any:
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
        )  # fmt: skip
        return MixtralForCausalLM(config).eval()

    model, name = mixtral(), "model.layers.0.mlp.experts.down_proj"
    lowbit.quantize_(model, scheme)
    wanted = logits(model)
    assert isinstance(model.get_parameter(name), QTensor)
    assert compute_module_sizes(model)[""] == held(model)
    for way in ("cpu_offload", "disk_offload"):
        assert torch.equal(logits(by_hooks(tmp_path / "after")[way](copy.deepcopy(model))), wanted), way
        placed = by_hooks(tmp_path / "before")[way](mixtral())
        lowbit.quantize_(placed, scheme)
        assert placed.get_parameter(name).is_meta
        assert torch.equal(logits(placed), wanted), way
    model.save_pretrained(tmp_path / "codes")
    for device_map in ({"": "cpu"}, {"": "disk"}):
        with init_empty_weights():
            empty = mixtral()
        found = load_checkpoint_and_dispatch(empty, tmp_path / "codes", device_map, offload_folder=str(tmp_path / "off"))
        assert torch.equal(logits(found), wanted)
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path / "state"))
    before = model.get_parameter(name).clone()
    model.get_parameter(name).data += 1
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model.get_parameter(name), before)
    accelerator.free_memory()


@works_with("accelerate", "Accelerator: prepare, backward, save_state, load_state")
def test_states_of_other_models_are_refused_and_models_saved(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(quantized("int4"))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.free_memory()
    accelerator.prepare(Classifier("int4"))
    with pytest.raises(RuntimeError, match="holds the state of another model: it lacks"):
        accelerator.load_state(str(tmp_path / "state"))
    accelerator.free_memory()
    accelerator.prepare(quantized("int8"))
    with pytest.raises(RuntimeError, match=r"size mismatch|without|needs"):
        accelerator.load_state(str(tmp_path / "state"))
    unwrapped = accelerator.unwrap_model(model)
    options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    unwrapped.save_pretrained(tmp_path / "saved", state_dict=accelerator.get_state_dict(model), **options)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))
    accelerator.free_memory()
