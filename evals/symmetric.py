"""Which scales symmetric integers want: those of the largest magnitude alone, or those that use the lowest code too.

    python -m lowbit.evals.symmetric --models FOLDER ... --text FILE --out symmetric.json

Decibels of rounding to nearest on drawn weights and on the linear layers of models, for every width and group size, with scales
by ``"absmax"`` and by ``"range"`` (see ``lowbit.scales.choose``) in the same bytes; then what the models lose with each.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import QTensor, Recipe, Scheme, quantize_
from lowbit.layer_config import LayerConfig

from .quality import Bench
from .results import write_result
from .sqnr import DEGREES, draw
from .tables import RESULTS, symmetric_table

__all__ = ["GROUPS", "RECIPES", "RULES", "main", "measure_models", "measure_weights"]

RULES = ("absmax", "range")
BITS, GROUPS = range(2, 9), (32, 64, 128, -1)
RECIPES = (
    "int2_sym", "int3_sym", "int4_sym", "int8", "int8_dynamic_activation_int4_weight", "int8_dynamic_activation_int8_weight",
)  # fmt: skip
N, K, SEED = 512, 1024, 0


def drawn(n: int = N, k: int = K, seed: int = SEED) -> dict[str, list[Tensor]]:
    """Weights [n, k], float32, by the name of their distribution."""
    gaussian, heavy = draw(n, k, seed)
    flat = torch.rand(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    laplace = -flat.sign() * torch.log1p(-2 * flat.abs())
    return {"Gaussian": [gaussian], "Laplace": [laplace.float()], f"Student's t, {DEGREES}": [heavy]}


def measure_weights(name: str, weights: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    """Decibels by each of the ``RULES``, in the mean over ``weights``, a row for each width and group size."""
    for group in GROUPS:
        for bits in BITS:
            scheme = Scheme(f"int{bits}", group)
            found = {rule: _decibels(weights, scheme, rule) for rule in RULES}
            yield {"weights": name, "scheme": str(scheme), "bits": bits, "group_size": group, "db": found}


def _decibels(weights: Sequence[Tensor], scheme: Scheme, rule: str) -> float:
    found = []
    for w in weights:
        error = QTensor.quantize(w, scheme, method=rule).dequantize(torch.float32) - w
        found.append(10 * torch.log10(w.double().square().sum() / error.double().square().sum()))
    return round(float(torch.stack(found).mean()), 3)


def measure_models(bench: Bench, recipes: Sequence[str] = RECIPES) -> Iterator[dict[str, Any]]:
    """What the model predicts with each recipe, by each of the ``RULES``."""
    for name in recipes:
        (rule,) = Recipe.parse(name).rules
        assert rule.config is not None
        figures = {scales: _figures(bench, rule.config.replace(scales=scales)) for scales in RULES}
        yield {"model": bench.material["model"], "recipe": name, "scheme": str(rule.config.weight), "by": figures}


def _figures(bench: Bench, config: LayerConfig) -> dict[str, Any]:
    model = copy.deepcopy(bench.model)
    quantize_(model, config)
    return bench.figures(model)


def linear_weights(model: nn.Module, every: int = 1) -> list[Tensor]:
    """The weights of the linear layers but the head, of the first of each ``every``."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return [m.weight.detach().float() for m in layers[::every]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure symmetric integers with and without their lowest code.")
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders of transformers")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file to predict")
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--every", type=int, default=1, help="take the decibels of one layer in so many")
    parser.add_argument("--compared", type=int, default=10, help="chunks on which the divergence is measured")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "symmetric.json", help="JSON file to write")
    o = parser.parse_args(arguments)
    weights = [row for name, found in drawn().items() for row in measure_weights(name, found)]
    result: dict[str, Any] = {"rows": N, "columns": K, "seed": SEED, "weights": weights, "materials": [], "models": []}
    for folder in o.models:
        with Bench(folder, o.text, o.text, 1, o.chunks, o.compared, o.context, o.device) as bench:
            weights += measure_weights(folder.name, linear_weights(bench.model, o.every))
            result["device"] = bench.device
            facts = {name: bench.material[name] for name in ("model", "text", "chunks", "compared", "context")}
            result["materials"].append({**facts, "every": o.every, "perplexity": bench.float_row()["perplexity"]})
            for row in measure_models(bench):
                result["models"].append(row)
                print(row["model"], row["recipe"], *(f"{row['by'][rule]['perplexity']:.2f}" for rule in RULES), flush=True)
                write_result(o.out, result)
    print(symmetric_table([result]))


if __name__ == "__main__":
    main()
