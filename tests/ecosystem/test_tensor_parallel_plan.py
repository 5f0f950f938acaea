"""``tp_plan="auto"`` of transformers on a quantized folder and with lowbit.Config: two processes give what one process gives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import lowbit
from tests.support import models

WHOLE = ("int4", "int4_g32", "int3_g48", "nf4", "nvfp4", "mxfp4", "fp6_e3m2", "int8_dynamic_activation_int8_weight")
MIXED = {"*down_proj": "int8_dynamic_activation_int4_weight", "*o_proj": "int8", "*layers.1*": "nf4", "*": "int3_g16"}
RECIPES: dict[str, Any] = {**{name: name for name in WHOLE}, "mixed": MIXED}
EMBEDDINGS = {"*embed_tokens": "int4", "lm_head": "int4", "*": "nvfp4"}
REFUSED = {
    "rows": ({"*up_proj": "int4"}, {"intermediate_size": 173}),
    "columns": ({"*down_proj": "int3_g16"}, {"intermediate_size": 172}),
}
IDS = models.tokens(2, 7)


def llama(tied: bool = False, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = models.llama(tied).config
    config.update({"intermediate_size": 192, **changes})
    return type(models.llama())(config).eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


def answers(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


# ---- what each process does ----------------------------------------------------------------------------------------


def shared(folder: Path, config: Any = None) -> Any:
    from transformers.distributed import DistributedConfig

    how = {} if config is None else {"quantization_config": lowbit.Config(config)}
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"), **how)


def held(model: Any) -> int:
    return sum(getattr(p, "_local_tensor", p).nbytes for p in model.model.layers.parameters())


def run(rank: int, port: int, home: Path, reported: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    tasks: dict[Any, Callable[[], Any]] = {}
    for name, recipe in RECIPES.items():
        tasks[name, "folder"] = lambda name=name: shared(home / name)
        tasks[name, "Config"] = lambda recipe=recipe: shared(home / "float", recipe)
    tasks["tied", "folder"] = lambda: shared(home / "tied")
    tasks["tied", "Config"] = lambda: shared(home / "tied float", EMBEDDINGS)
    tasks["experts", "folder"] = lambda: shared(home / "experts")
    tasks["experts", "Config"] = lambda: shared(home / "experts float", "nvfp4")
    for name, (recipe, _) in REFUSED.items():
        tasks[name, "refused"] = lambda name=name, recipe=recipe: shared(home / name, recipe)
    for key, task in tasks.items():
        try:
            model = task()
            wrote = model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
            found: Any = (answers(model).tolist(), held(model), wrote)
            try:
                model.save_pretrained(home / f"shared by {rank}")
            except ValueError as error:
                found = (*found, str(error))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        reported.put((key, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folders, and the models that one process makes of them."""
    home, found = tmp_path_factory.mktemp("plan"), {}
    llama().save_pretrained(home / "float")
    llama(tied=True).save_pretrained(home / "tied float")
    mixtral().save_pretrained(home / "experts float")
    for name, recipe in {**RECIPES, "tied": EMBEDDINGS, "experts": "nvfp4"}.items():
        found[name] = model = mixtral() if name == "experts" else llama(tied=name == "tied")
        lowbit.quantize_(model, recipe)
        model.save_pretrained(home / name)
    for name, (_, changes) in REFUSED.items():
        llama(**changes).save_pretrained(home / name)
    return home, found


@pytest.fixture(scope="module")
def reported(alone: tuple[Path, dict[str, Any]]) -> dict[Any, list[Any]]:
    """What both processes found: starting them takes longer than all that they do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = mp.spawn(run, args=(port, alone[0], queue), nprocs=2, join=False)
    found: dict[Any, list[Any]] = {}
    for _ in range(2 * (2 * len(RECIPES) + 4 + len(REFUSED))):
        key, what = queue.get(timeout=240)
        found.setdefault(key, []).append(what)
    processes.join()
    return found


@pytest.mark.works_with("transformers", "tp_plan on a folder and with Config")
@pytest.mark.parametrize("way", ["folder", "Config"])
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_give_what_one_gives(alone: Any, reported: dict[Any, list[Any]], name: str, way: str) -> None:
    model = alone[1][name]
    for found in reported[name, way]:
        assert not isinstance(found, str), found
        logits, size, wrote, refusal = found
        torch.testing.assert_close(torch.tensor(logits), answers(model))  # sums of float32 in two parts
        assert size < 0.6 * held(model)
        assert wrote == model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
        assert "is a DTensor: gather" in refusal


@pytest.mark.works_with("transformers", "tp_plan on a folder and with Config")
def test_embeddings_and_heads_that_share_a_weight(alone: Any, reported: dict[Any, list[Any]]) -> None:
    for found in reported["tied", "folder"]:
        assert not isinstance(found, str), found
        torch.testing.assert_close(torch.tensor(found[0]), answers(alone[1]["tied"]))
    for found in reported["tied", "Config"]:
        assert "model.embed_tokens and lm_head share one weight" in found
        assert "quantize it first (lowbit quantize), and load that folder" in found


@pytest.mark.works_with("transformers", "tp_plan on a folder and with Config")
def test_experts_in_one_parameter(alone: Any, reported: dict[Any, list[Any]]) -> None:
    for found in reported["experts", "folder"]:
        assert not isinstance(found, str), found
        torch.testing.assert_close(torch.tensor(found[0]), answers(alone[1]["experts"]))
        assert found[1] < 0.6 * held(alone[1]["experts"])
    for found in reported["experts", "Config"]:
        assert "experts.gate_up_proj is a parameter of its own, which cannot be quantized while processes share" in found


def test_what_cannot_be_shared_names_the_layer_and_the_group(reported: dict[Any, list[Any]]) -> None:
    for found in reported["rows", "refused"]:
        assert "model.layers.0.mlp.up_proj, uint4:g128:zint:bf16, cannot be shared by 2 processes" in found
        assert "rows of (173, 64) are not shared evenly" in found
    for found in reported["columns", "refused"]:
        assert "model.layers.0.mlp.down_proj, uint3:g16:zint:bf16, cannot be shared by 2 processes" in found
        assert "multiples of 8, got 0:86" in found
