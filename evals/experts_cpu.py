"""One token through a layer of experts on a CPU, quantized and in bf16: the table of experts on a CPU.

    python -m lowbit.evals.experts_cpu --out experts_cpu.json

The experts are those of Qwen3-30B-A3B (E 128, top 8, H 2,048, I 768) with random weights, and each token chooses eight of its
own, so that the last-level cache holds hardly any of what is read. Calls of all ways are interleaved; the median of each counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit import quantize_

from .read_limit import ReadLimits
from .results import write_result
from .tables import RESULTS, experts_cpu_table

__all__ = ["FLOAT", "SCHEMES", "main", "measure"]

FLOAT = ("eager", "grouped_mm", "batched_mm")
"""transformers' implementations, which multiply in bf16."""
SCHEMES = ("int8", "int4", "int3", "mxfp4")
SHAPE = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}


def layer(shape: dict[str, int], seed: int) -> nn.Module:
    """A model of one block with these experts, in bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    small = {"vocab_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **small, intermediate_size=64)).bfloat16().eval()
    with torch.no_grad():
        for parameter in model.model.layers[0].mlp.experts.parameters():
            parameter.normal_(0, 0.02)
    return model


def measure(shape: dict[str, int], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way: microseconds a token, the bytes of its experts, and how long reading them takes."""
    generator = torch.Generator().manual_seed(0)
    h, e, top = shape["hidden_size"], shape["num_experts"], shape["num_experts_per_tok"]
    given = [
        (
            torch.randn(1, h, generator=generator).bfloat16(),
            torch.randperm(e, generator=generator)[:top][None],
            torch.rand(1, top, generator=generator).bfloat16(),
        )
        for _ in range(tokens)
    ]
    models = {"bf16": layer(shape, 0)}
    for scheme in SCHEMES:
        models[scheme] = layer(shape, 0)
        quantize_(models[scheme], {"*experts*": scheme})
    ways = [*(("bf16", name) for name in FLOAT), *((scheme, "lowbit") for scheme in SCHEMES)]
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    with torch.no_grad():
        for _ in range(rounds + 1):
            for token in given:
                for name, implementation in ways:
                    model: Any = models[name]
                    model.config._experts_implementation_internal = implementation
                    experts = model.model.layers[0].mlp.experts
                    began = time.perf_counter()
                    experts(*token)
                    times[name, implementation].append(1e6 * (time.perf_counter() - began))
    limits = ReadLimits(torch.device("cpu"))
    rows = []
    for (name, implementation), found in times.items():
        parameters = models[name].model.layers[0].mlp.experts.parameters()  # type: ignore[union-attr]
        size = sum(parameter.nbytes for parameter in parameters) * top // e
        rows.append(
            {
                "weights": name, "implementation": implementation, "us": statistics.median(found[tokens:]),
                "bytes": size, "read_us": limits(size).us,
            }
        )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time one token through quantized experts on a CPU.")
    parser.add_argument("--tokens", type=int, default=32, help="calls of each way in a round, each for other experts")
    parser.add_argument("--rounds", type=int, default=5, help="behind one that does not count")
    parser.add_argument("--out", type=Path, default=RESULTS / "experts_cpu.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    result = {"shape": SHAPE, "rows": measure(SHAPE, options.tokens, options.rounds)}
    write_result(options.out, result)
    print(experts_cpu_table([result]))


if __name__ == "__main__":
    main()
