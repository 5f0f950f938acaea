"""A model on several GPUs beside one: tokens a second with tensor parallel layers, and what a GPU holds while an adapter is
trained over a model that fully_shard divides.

    torchrun --nproc-per-node 2 -m lowbit.evals.parallel --model llama-3-8b --out parallel.json

Weights are random. Every figure of one GPU is taken in the same run, by the first process, while the others wait.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowbit import quantize_
from lowbit.recipe import Recipe

from .gemv import device_name
from .generate import _Writer, with_head
from .results import write_result
from .shapes import random_model

__all__ = ["main"]

_PLAN = {"q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "o_proj": "rows"}
_PLAN |= {"gate_proj": "columns", "up_proj": "columns", "down_proj": "rows"}


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    return place


def _made(model: str, recipe: str, device: torch.device) -> Any:
    made = random_model(model, device, torch.bfloat16).requires_grad_(False)
    if recipe != "float":
        quantize_(made, with_head(Recipe.parse(recipe), made, "int8"))
    return made


def _divided(model: Any, mesh: Any) -> Any:
    """``model`` with its linear layers divided among the processes, as transformers' plan for a Llama divides them."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            names = [name for name, _ in part.named_children() if name in _PLAN]
            parallelize_module(
                part, mesh, {name: ColwiseParallel() if _PLAN[name] == "columns" else RowwiseParallel() for name in names}
            )
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return model


def _speed(model: Any, device: torch.device, context: int, steps: int, repeats: int) -> dict[str, Any]:
    """Milliseconds a token at batch 1, each token a replay of one CUDA graph; nothing is compiled."""
    with torch.no_grad():
        writer = _Writer(model, device, context + (repeats + 2) * steps + 8)
        writer.prefill(context)
        step = writer.captured() if device.type == "cuda" else writer.step
        step(steps)
        seconds = statistics.median(step(steps) / steps for _ in range(repeats))
    local = sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in model.parameters())
    return {"tokens_per_second": 1 / seconds, "ms_per_token": 1e3 * seconds, "parameter_bytes": local}


def _training(model: Any, device: torch.device, mesh: Any, length: int, steps: int) -> dict[str, Any]:
    """Steps of a LoRA of rank 16 over every linear layer; ``mesh``: fully_shard divides the model over it, block by block."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=16), autocast_adapter_dtype=False)
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(adapted, mesh=mesh)
    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = (
        torch.cuda.memory_allocated() if cuda else sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in model.parameters())
    )
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    losses, times = [], []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    adapted.train()
    for _ in range(steps):
        _wait(device)
        start = time.perf_counter()
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"resident_bytes": held, "peak_bytes": peak, "losses": losses, "seconds_per_step": statistics.median(times[1:])}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A model on several GPUs beside one.")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--recipes", default="float,int4")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a training step")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    from torch.distributed.device_mesh import init_device_mesh

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    figures: dict[str, Any] = {
        "model": options.model, "device": device_name(device), "processes": world, "context": options.context,
        "training_length": options.length, "decoding": [], "training": [], "failures": [],
    }  # fmt: skip

    def measure(kind: str, where: str, recipe: str, task: Callable[[Any], dict[str, Any]]) -> None:
        alone = where == "one"
        found: dict[str, Any] | None = None
        if rank == 0 or not alone:
            try:
                torch.manual_seed(0)
                found = task(_made(options.model, recipe, device))
            except Exception as error:
                traceback.print_exc()
                figures["failures"].append({"kind": kind, "where": where, "recipe": recipe, "error": f"{error!r:.600}"})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
        if rank == 0:
            if found is not None:
                figures[kind].append({"where": where, "recipe": recipe, **found})
            print(kind, where, recipe, found or figures["failures"][-1], flush=True)
            write_result(options.out, figures)

    for recipe in options.recipes.split(","):
        for where in ("one", "tensor parallel"):
            measure(
                "decoding", where, recipe,
                lambda model, where=where: _speed(
                    model if where == "one" else _divided(model, mesh), device, options.context, options.steps, 3
                ),
            )  # fmt: skip
    for recipe in options.recipes.split(","):
        for where in ("one", "fully_shard"):
            measure(
                "training", where, recipe,
                lambda model, where=where: _training(model, device, None if where == "one" else mesh, options.length, 4),
            )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
