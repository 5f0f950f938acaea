"""A model that holds quantized layers somewhere within is saved so that it loads equal, or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import transformers
from safetensors.torch import save_file, save_model
from torch import nn

import lowbit
from lowbit import QEmbedding, QLinear, QTensor
from tests.support import models

REFUSED = r"no storage that a file of plain tensors could hold: save the model with lowbit\.save"
SCHEMES = ["int4", "nvfp4", "int8_dynamic_activation_int8_weight"]
PARTS: dict[str, tuple[Callable[[], Any], Callable[[Any], nn.Module]]] = {
    "blocks": (models.llama, lambda m: m.model.layers),
    "one block's layers": (models.llama, lambda m: m.model.layers[0].mlp),
    "a language model": (lambda: vision(), lambda m: m.model.language_model),
}


def vision() -> Any:
    text = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    image = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=image, text_config=text, image_token_id=63)
    ).eval()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("where", PARTS)
def test_a_part_is_quantized_and_the_whole_is_saved(where: str, scheme: str, tmp_path: Path) -> None:
    made, part = PARTS[where]
    model = made()
    lowbit.quantize_(part(model), scheme)
    with pytest.raises(RuntimeError, match=REFUSED):
        model.save_pretrained(tmp_path / "refused")
    with pytest.raises(RuntimeError, match=REFUSED):
        save_model(model, str(tmp_path / "model.safetensors"))
    with pytest.raises(RuntimeError, match=REFUSED):
        save_file({"w": next(p for p in model.parameters() if isinstance(p, QTensor))}, tmp_path / "file.safetensors")
    lowbit.save(model, tmp_path / "saved")
    again, ids = type(model).from_pretrained(tmp_path / "saved"), torch.arange(5)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = made()
    lowbit.quantize_(part(fresh), scheme)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_within_another_librarys_saves_itself(scheme: str, tmp_path: Path) -> None:
    outer = nn.Sequential(models.llama(), nn.Linear(8, 8))
    lowbit.quantize_(outer, {"0.*": scheme})
    outer[0].save_pretrained(tmp_path)
    ids = torch.arange(5)[None]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, outer[0](ids).logits)


# ---- other processes -----------------------------------------------------------------------------------------------


def _answer(rank: int, model: nn.Module, x: torch.Tensor, reported: Any) -> None:
    reported.put((rank, model(x).tolist()))


@pytest.mark.works_with("torch", "pickle, spawn")
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_reaches_a_spawned_process(shared: bool) -> None:
    """Of every layout and kind of scheme, at once: a process takes seconds to start."""
    torch.manual_seed(0)
    kinds = [
        QLinear(QTensor.quantize(torch.randn(64, 64), name), nn.Parameter(torch.randn(64))) for name in ("int4", "int3", "nvfp4")
    ]
    model = nn.Sequential(*kinds, QLinear(QTensor.quantize(torch.randn(64, 64), "int8"), activation=lowbit.Scheme.parse("int8")))
    model.append(QLinear(model[0].weight)).requires_grad_(False)
    x = torch.randn(3, 64)
    wanted = model(x)
    if shared:
        model.share_memory()
    context = mp.get_context("spawn")
    reported = context.SimpleQueue()
    mp.spawn(_answer, args=(model, x, reported), nprocs=1)
    rank, got = reported.get()
    assert rank == 0
    assert torch.equal(torch.tensor(got), wanted)
    assert torch.equal(model(x), wanted)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of an embedding, looked up in a worker."""

    def __init__(self, table: QEmbedding) -> None:
        self.table = table

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.table(torch.tensor(i)).detach()


@pytest.mark.works_with("torch", "pickle, spawn")
def test_a_data_set_that_holds_a_weight_is_spawned() -> None:
    table = QEmbedding(QTensor.quantize(torch.randn(4, 64), "int4"))
    loader = torch.utils.data.DataLoader(Rows(table), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    (rows,) = list(loader)
    assert torch.equal(rows, table(torch.arange(4)))
