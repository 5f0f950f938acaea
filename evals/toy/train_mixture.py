"""Trains a small mixture of experts on the invented encyclopedia, out of the bundled toy model.

    python -m lowbit.evals.toy.train_mixture --out FOLDER

Sparse upcycling (Komatsuzaki et al., "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints", 2022): a Mixtral
whose attention, norms and embeddings are those of the dense model, and whose experts are copies of its feed-forward blocks, each
with noise of its own. Training then tells them apart. The defaults take six minutes of one CPU core; the mixture has 6.4
million parameters and is not kept here, its figures are (``evals/results/mixture.json``).
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from .corpus import exam as questions_of
from .train import CONTEXT, Windows, fit, save, share_of, tokens_of
from .world import ENTITIES, SEED, build

__all__ = ["main", "upcycled"]

DENSE = Path(__file__).parent / "model"


def upcycled(dense: LlamaForCausalLM, experts: int, noise: float, seed: int) -> MixtralForCausalLM:
    """A Mixtral with ``experts`` experts of which each token takes two, made of ``dense``.

    The weights of each expert are those of the dense block plus normal noise, ``noise`` times their own standard deviation.
    """
    c = dense.config
    settings = {name: getattr(c, name) for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps",
        "rope_parameters", "head_dim",
    )}  # fmt: skip
    torch.manual_seed(seed)
    model = MixtralForCausalLM(MixtralConfig(**settings, num_local_experts=experts, num_experts_per_tok=2, sliding_window=None))
    generator = torch.Generator().manual_seed(seed)

    def copies(weight: Tensor) -> Tensor:
        """[E, N, K]"""
        w = weight.detach().float().expand(experts, *weight.shape)
        return w + noise * w[0].std() * torch.randn(w.shape, generator=generator)

    state = model.state_dict()
    with torch.no_grad():
        for name, value in dense.state_dict().items():
            if ".mlp." not in name:
                state[name].copy_(value)
        for i, layer in enumerate(dense.model.layers):
            mlp, prefix = layer.mlp, f"model.layers.{i}.mlp.experts"
            gate_up = torch.cat([copies(mlp.gate_proj.weight), copies(mlp.up_proj.weight)], 1)
            state[f"{prefix}.gate_up_proj"].copy_(gate_up)
            state[f"{prefix}.down_proj"].copy_(copies(mlp.down_proj.weight))
    return model


def main() -> None:
    """Train the mixture and save it for transformers."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the mixture")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="train for this long instead of a number of steps")
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {CONTEXT} tokens a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--noise", type=float, default=0.5, help="of an expert's weights, in their standard deviations")
    parser.add_argument("--editions", type=int, default=2, help="editions of the encyclopedia to draw from")
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DENSE, local_files_only=True)
    dense = LlamaForCausalLM.from_pretrained(DENSE, dtype=torch.float32, local_files_only=True)
    model = upcycled(dense, o.experts, o.noise, o.seed)
    world = build(SEED, ENTITIES)
    tests = [question for paper in questions_of(world, SEED).values() for question in paper[5:]]
    ids, starts = tokens_of(world, o.editions, o.seed, tokenizer)

    def report(row: dict[str, object]) -> None:
        print(json.dumps(row), flush=True)

    report({"parameters": sum(p.numel() for p in model.parameters()), "tokens": len(ids)})
    windows = Windows(ids, starts, o.batch, o.seed, "cpu")
    steps = fit(model, tokenizer, windows, tests[::64], o.steps, o.rate, report, o.seconds)
    model.eval()
    save(model, tokenizer, o.out)
    report({"steps": steps, "exam": round(share_of(model, tokenizer, tests[::16]), 4)})


if __name__ == "__main__":
    main()
