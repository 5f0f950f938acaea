"""Few tokens through a layer of experts on a GPU, quantized and in bf16: the table of experts on a GPU.

A CUDA graph can capture at most as many choices (tokens times top-k) as there are experts: for more the host has to know which
expert each token chose. Larger numbers of tokens are left out.

    python -m lowbit.evals.experts_gpu --out experts_gpu.json

The experts are those of Mixtral-8x7B (E 8, top 2, H 4,096, I 14,336) and Qwen3-30B-A3B (E 128, top 8, H 2,048, I 768) with random
weights; each token chooses experts of its own, in turn, so that the cache holds hardly any of what is read. A sweep of calls is
one CUDA graph, interleaved with a sweep of bf16's quickest implementation. The whole layer is timed behind the router: both
products, the activation between them and the weighted sum.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import QTensor, quantize_, trace_kernels
from lowbit.expert_products import experts_linear, has_experts_kernel

from .cold_cache import CLOCK_BOUND_ROWS, Sweep, timed
from .read_limit import ReadLimits
from .results import write_result
from .tables import RESULTS, experts_gpu_table

__all__ = ["FLOAT", "SCHEMES", "SHAPES", "main", "measure"]

FLOAT = ("grouped_mm", "batched_mm")
"""transformers' implementations that a CUDA graph can capture; ``eager`` waits for the host."""
SCHEMES = ("int4", "int8", "int3", "mxfp4", "nvfp4")
SHAPES: dict[str, dict[str, int]] = {
    "Mixtral-8x7B": {"experts": 8, "top_k": 2, "hidden": 4096, "intermediate": 14336},
    "Qwen3-30B-A3B": {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768},
}
TOKENS = (1, 4, 16)
_CALLS = 24  # calls of a sweep, each for other experts
_GATHERED = 24 << 30  # bytes of copies of weights beyond which batched_mm is left out


def layer(shape: dict[str, int], device: torch.device) -> nn.Module:
    """transformers' module of these experts in bf16, in a model of one block, with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    small = {"vocab_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3MoeConfig(
        hidden_size=shape["hidden"], moe_intermediate_size=shape["intermediate"], num_experts=shape["experts"],
        num_experts_per_tok=shape["top_k"], intermediate_size=64, **small,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return model.eval()


def choices(shape: dict[str, int], tokens: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Experts [tokens, k] and their weights for each call of a sweep: each expert about as often, no two alike for a token."""
    generator = torch.Generator().manual_seed(0)
    experts, k = shape["experts"], shape["top_k"]
    stream = itertools.chain.from_iterable(torch.randperm(experts, generator=generator).tolist() for _ in itertools.count())
    calls = _CALLS if tokens <= 64 else 4
    found = []
    for _ in range(calls):
        # experts of a token follow each other in a permutation, whose length k divides
        chosen = torch.tensor([list(itertools.islice(stream, k)) for _ in range(tokens)])
        weights = torch.rand(tokens, k, generator=generator).softmax(-1).bfloat16()
        found.append((chosen.to(device), weights.to(device)))
    return found


def _bytes_of(experts: nn.Module, chosen: Tensor, number: int) -> int:
    return sum(parameter.nbytes for parameter in experts.parameters()) * len(chosen.unique()) // number


def _products(experts: Any, chosen: Tensor, between: Tensor, x: Tensor) -> Tensor:
    experts_linear(x, experts.gate_up_proj, chosen)
    return experts_linear(between, experts.down_proj, chosen)


def measure(
    shape: dict[str, int], schemes: Sequence[str] = SCHEMES, tokens: Sequence[int] = TOKENS,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each scheme and number of tokens: microseconds of the layer and of its products alone, those of bf16's quickest
    way beside it, and how long reading the chosen experts takes."""
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    limits = ReadLimits(device, 5)
    tokens = [m for m in tokens if m * shape["top_k"] <= shape["experts"]]
    dense: Any = layer(shape, device)
    floats = dense.model.layers[0].mlp.experts
    per_expert = sum(parameter.nbytes for parameter in floats.parameters()) // shape["experts"]
    calls: dict[tuple[str, int], list[Callable[[Tensor], Tensor]]] = {}
    quickest: dict[int, tuple[str, list[Callable[[Tensor], Tensor]]]] = {}
    torch.manual_seed(0)
    inputs = {m: torch.randn(m, shape["hidden"], device=device).bfloat16() for m in tokens}

    def of(module: Any, config: Any, implementation: str, chosen: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            config._experts_implementation_internal = implementation
            return module(x, chosen, weights)

        return call

    with torch.no_grad():
        for m in tokens:
            taken = {}
            for name in FLOAT:
                if name == "batched_mm" and m * shape["top_k"] * per_expert > _GATHERED:
                    continue
                calls[name, m] = [of(floats, dense.config, name, *choice) for choice in choices(shape, m, device)]
                taken[name] = timed(calls[name, m], inputs[m], settle_clock=m > CLOCK_BOUND_ROWS).us
            best = min(taken, key=lambda name: taken[name])
            quickest[m] = best, calls[best, m]
            rows += [
                {"weights": "bf16", "implementation": name, "tokens": m, "us": us} for name, us in taken.items()
            ]  # fmt: skip
        for scheme in schemes:
            model: Any = layer(shape, device)
            quantize_(model, {"*experts*": scheme})
            experts = model.model.layers[0].mlp.experts
            for m in tokens:
                chosen = choices(shape, m, device)
                ways = [of(experts, model.config, "lowbit", *choice) for choice in chosen]
                with trace_kernels() as trace:
                    ways[0](inputs[m])
                heavy = m > CLOCK_BOUND_ROWS
                times = timed(ways, inputs[m], settle_clock=heavy, baseline=Sweep(quickest[m][1], inputs[m]))
                size = sum(_bytes_of(experts, picked, shape["experts"]) for picked, _ in chosen) // len(chosen)
                row = {
                    "weights": scheme, "implementation": "lowbit", "tokens": m, "us": times.us, "no_pdl_us": times.no_pdl_us,
                    "float": quickest[m][0], "float_us": times.baseline_us, "bytes": size, "read_us": limits(size).us,
                    "kernels": sorted(trace.kernels()),
                }  # fmt: skip
                if isinstance(experts.gate_up_proj, QTensor) and has_experts_kernel(
                    experts.gate_up_proj, inputs[m], m * shape["top_k"]
                ):
                    between = torch.randn(m * shape["top_k"], shape["intermediate"], device=device).bfloat16()
                    alone = [partial(_products, experts, picked.flatten(), between) for picked, _ in chosen]
                    row["products_us"] = timed(alone, inputs[m], settle_clock=heavy).us
                rows.append(row)
                keep(rows)
            del model, experts
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time tokens through quantized experts on a GPU.")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, default=RESULTS / "experts_gpu.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in options.shapes.split(","):

        def keep(rows: list[dict[str, Any]], name: str = name) -> None:
            found[name] = rows
            write_result(options.out, {"shapes": SHAPES, "rows": found})

        measure(SHAPES[name], options.schemes.split(","), [int(m) for m in options.tokens.split(",")], keep)
        gc.collect()
        torch.cuda.empty_cache()
    print(experts_gpu_table([{"rows": found}]))


if __name__ == "__main__":
    main()
