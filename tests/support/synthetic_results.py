"""Results of an evaluation that nobody ran: plausible, whole, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.evals.paired import paired_difference

# name: bits a weight, points of accuracy lost, perplexity over the float model's, decibels of a layer
RECIPES = {
    "float": (16.0, 0.0, 1.0, None),
    "int8": (8.07, -0.1, 1.0, 41.0),
    "int8_dynamic_activation_int8_weight": (8.07, 0.1, 1.0, 41.0),
    "fp8": (8.07, 0.1, 1.001, 31.5),
    "fp6": (6.16, 0.3, 1.002, 31.4),
    "int4": (4.2, 0.9, 1.02, 19.9),
    "int4_awq": (4.2, 0.5, 1.012, 20.4),
    "int4_sym": (4.16, 1.6, 1.04, 18.6),
    "mxfp4": (4.25, 1.4, 1.035, 18.8),
    "nvfp4": (4.5, 0.7, 1.02, 20.4),
    "int3": (3.19, 8.0, 1.14, 13.3),
    "int2": (2.28, 49.0, 13.7, 6.8),
}
# scheme: bits a weight, the part of the limit that is reached
_REACHED = {"float": (16, 0.4), "int8": (8, 0.7), "int4": (4, 0.4), "nf4": (4.25, 0.3), "int3": (3.2, 0.012)}
_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def result(
    seed: int = 0,
    recipes: Sequence[str] = tuple(RECIPES),
    tasks: Sequence[str] = ("mmlu",),
    n: int = 800,
    layers: int = 28,
    gemv: bool = True,
    model: str = "toy/llama-2m",
) -> dict[str, Any]:
    """A result in ``lowbit-eval/1``: ``n`` questions a task, ``layers`` layers."""  # fmt: skip
    rng = np.random.default_rng(seed)
    floats = {task: rng.random(n) < 0.86 for task in tasks}
    outcomes = [_outcome(name, rng, floats, layers) for name in recipes]
    for task in tasks:
        _adjust([o["tasks"][task]["difference"] for o in outcomes if o["tasks"][task]["difference"]])
    return {
        "format": "lowbit-eval/1",
        "origin": {
            "date": "2026-11-21", "commit": "d1cd5c5", "gpus": [],
            "versions": {"lowbit": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.23.0", "python": "3.11.7"},
            "cpu": {"name": "AMD EPYC", "instruction_sets": ["avx2"], "threads": 2, "system": "Linux x86_64"},
        },
        "model": model, "tasks": [*tasks, "perplexity"], "seconds": 84.5, "outcomes": outcomes,
        "gemv": _gemv(rng) if gemv else None,
    }  # fmt: skip


def _outcome(name: str, rng: np.random.Generator, floats: dict[str, Any], layers: int) -> dict[str, Any]:
    bits, lost, worse, decibels = RECIPES.get(name, (5.0, 1.0, 1.05, 22.0))
    weights, other = 2_000_000, 780_000
    size = {"codes": int(weights * round(bits) / 8), "scales": int(weights * max(bits - round(bits), 0) / 8), "float": other}
    if name == "float":
        size = {"codes": 0, "scales": 0, "float": 2 * weights + other}
    reference = "activation" in name
    kernel = "reference_quantized_linear" if reference else "cpu_gemv"
    return {
        "recipe": name, "bits_per_weight": bits, "size": size, "file_bytes": sum(size.values()) + 9_304,
        "perplexity": {"value": 9.84 * worse, "loss": float(np.log(9.84 * worse)), "tokens": 18396, "chunks": 36, "context": 512},
        "tasks": {task: _task(name, rng, right, lost) for task, right in floats.items()},
        "divergence": None if name == "float" else _divergence(worse, decibels or 20),
        "layers": [] if decibels is None else [
            {"name": f"model.layers.{i // 7}.{'mlp' if i % 7 > 3 else 'self_attn'}.{_PARTS[i % 7]}", "scheme": name,
             "bits_per_weight": bits, "sqnr_db": float(decibels + rng.normal(0, 0.8) - 2 * (i % 7 == 6))}
            for i in range(layers)
        ],
        "histograms": [] if decibels is None else [_histogram(rng, round(bits))],
        "kernels": {"decode": {}, "prompt": {}} if name == "float" else
            {"decode": {kernel: layers}, "prompt": {kernel if reference else "reference_linear": layers}},
        "speed": {"tokens_per_second": float(rng.uniform(150, 360) / (6 if reference else 1)), "first_token": 0.004, "steps": 96},
        "seconds": float(rng.uniform(3, 9)),
    }  # fmt: skip


def _task(name: str, rng: np.random.Generator, right: Any, lost: float) -> dict[str, Any]:
    own = right.copy()
    if name != "float":
        chance = rng.random(len(right))
        own = np.where(right, chance > (0.008 + lost / 86), chance < 0.03)
    subjects = ["abstract_algebra", "world_history", "anatomy", "marketing"]
    of = [subjects[i % 4] for i in range(len(right))]
    found = None if name == "float" else paired_difference(right.tolist(), own.tolist())
    value = float(own.mean())
    return {
        "metric": "acc", "n": len(right), "value": value, "stderr": (value * (1 - value) / len(right)) ** 0.5,
        "subjects": {s: {"n": of.count(s), "value": float(np.mean([r for r, o in zip(own, of, strict=True) if o == s]))}
                     for s in subjects},
        "difference": None if found is None else {
            "n": found.n, "difference": found.difference, "low": found.low, "high": found.high, "gained": found.gained,
            "lost": found.lost, "mcnemar": _binomial(found.gained, found.lost), "holm": None, "questions_for_one_point": 4120,
        },
        "samples": [{"id": str(i), "subject": of[i], "right": bool(r), "picked": "ABCD"[i % 4]} for i, r in enumerate(own)],
    }  # fmt: skip


def _binomial(gained: int, lost: int) -> float:
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _adjust(differences: list[dict[str, Any]]) -> None:
    """Holm's step-down over the recipes of a task."""
    highest = 0.0
    for rank, found in enumerate(sorted(differences, key=lambda d: d["mcnemar"])):
        highest = max(highest, min(1.0, found["mcnemar"] * (len(differences) - rank)))
        found["holm"] = highest


def _divergence(worse: float, decibels: float) -> dict[str, Any]:
    kl = 0.6 * 10 ** (-decibels / 10) * (1 + worse)
    return {"kl": kl, "kl_low": 0.9 * kl, "kl_high": 1.1 * kl, "agreement": float(max(0.2, 1 - kl**0.5)), "tokens": 18396}


def _histogram(rng: np.random.Generator, bits: int) -> dict[str, Any]:
    weights = rng.standard_t(5, 20_000) * 0.02
    top = float(np.abs(weights).max()) * 0.55
    grid = np.linspace(-top, top, 2 ** min(bits, 8))
    rounded = (
        grid[np.abs(weights[:, None] - grid[None]).argmin(1)] if bits < 6 else weights + rng.normal(0, top / 2**bits, 20_000)
    )
    # Groups differ in their scale, so that what is rounded lies about the grid of one of them.
    rounded = rounded * rng.normal(1, 0.012, 20_000)
    edges = np.linspace(-0.1, 0.1, 81)
    return {
        "name": "model.layers.0.mlp.down_proj", "edges": edges.tolist(),
        "before": np.histogram(weights, edges)[0].tolist(), "after": np.histogram(rounded, edges)[0].tolist(),
        "grid": grid.tolist(),
    }  # fmt: skip


def speeds(device: str) -> dict[str, Any]:
    """What ``lowbit bench gemv`` would write on ``device``."""
    origin = {"date": "2026-11-21", "commit": "d1cd5c5", "versions": {"torch": "2.13.0"}, "cpu": {}, "gpus": []}
    return {**origin, **_gemv(np.random.default_rng(0)), "device": device}


def _gemv(rng: np.random.Generator) -> dict[str, Any]:
    rows = []
    for n, k in ((4096, 4096), (11008, 4096)):
        for m in (1, 8):
            for scheme, (bits, reached) in _REACHED.items():
                limit = n * k * bits / 8 / 30e9 * 1e6
                us = limit / reached * (1 + 0.15 * m) * rng.uniform(0.95, 1.05)
                rows.append({
                    "scheme": scheme, "kernel": "F.linear" if scheme == "float" else "cpu_gemv", "contract": "exact",
                    "layout": "rows", "m": m, "n": n, "k": k, "bytes": int(n * k * bits / 8), "us": us, "pdl": None,
                    "billion_weights_per_second": n * k / us / 1e3, "limit_us": limit, "fraction_of_limit": limit / us,
                    "times_float": 1.0,
                })  # fmt: skip
    return {"device": "cpu, 2 threads", "dtype": "torch.bfloat16", "rows": rows, "peers": [], "failures": []}
