"""What each method leaves of a real model under each scheme, beside what other libraries leave: the table of quality.

    python -m lowbit.evals.quality --model FOLDER --text FILE --calibration FILE --peers FOLDER ... --out quality.json

Perplexity is that of the first chunks of the text in the model's own context, the divergence from the float model that of the
first few of them; the model is in float32. A folder of ``--peers`` is what ``quality_peers.py`` made of the same model. Rows
that the file holds already, measured on the same material, are kept.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import Calibration, QTensor, Recipe, Scheme, quantize_
from lowbit.recipe import split_recipes

from .divergence import Reference, divergence
from .gemv import device_name
from .perplexity import perplexity, windows_of
from .results import write_result
from .tables import RESULTS, quality_table
from .texts import read_text

__all__ = ["RECIPES", "Bench", "main"]

CHUNKS, COMPARED = 120, 30
_METHODS = (
    "{}", "hqq({})", "clip({})", "gptq({})", "gptq({}, asymmetric=true)", "awq({})", "awq(clip({}))", "awq(gptq({}))",
    "rotation(gptq({}))",
)  # fmt: skip
_BLOCKS = ("nf4", "mxfp4", "nvfp4")
_NEAR_LOSSLESS = ("int5", "int6", "int8", "fp6", "fp8", "mxfp6", "mxfp8", "mxint8")
RECIPES = {
    **{name: tuple(method.format(name) for method in _METHODS) for name in ("int4", "int3", "int2")},
    **{name: tuple(method.format(name) for method in ("{}", "clip({})", "gptq({})", "awq({})")) for name in _BLOCKS},
    **{name: tuple(method.format(name) for method in ("{}", "clip({})", "gptq({})")) for name in _NEAR_LOSSLESS},
    "w8a8": tuple(method.format("int8_dynamic_activation_int8_weight") for method in ("{}", "smoothquant({})")),
}
"""Recipes by the scheme under which they stand in the table."""


class Bench:
    """A float model and the material that what becomes of it is measured on.

    ``model``: a folder of transformers; ``text``: the file to predict, ``calibration``: the file of which methods that look at
    data see the first ``rows`` rows of ``context`` tokens; ``device``: where the model is quantized and runs.
    """

    def __init__(
        self,
        model: Path,
        text: Path,
        calibration: Path,
        rows: int,
        chunks: int,
        compared: int,
        context: int,
        device: str = "cpu",
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().to(device)
        self.device = device_name(torch.device(device))
        self.text, self.chunks, self.context = read_text(text), chunks, context
        self.data = Calibration(calibration, rows=rows, length=context, tokenizer=self.tokenizer)
        self.material = {
            "model": model.name, "text": _digest(self.text), "calibration": _digest(read_text(calibration)),
            "rows": rows, "chunks": chunks, "compared": compared, "context": context,
        }  # fmt: skip
        self._compared = compared
        self._reference: Reference | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        """Give back what the float model's predictions take on the disk."""
        if self._reference is not None:
            self._reference.close()

    def float_row(self) -> dict[str, Any]:
        """The figures of the model as it is."""
        return {
            "scheme": "float",
            "recipe": "float",
            "by": "",
            "bits_per_weight": 32.0,
            **self.figures(self.model, compare=False),
        }

    def lowbit_row(self, scheme: str, recipe: str) -> dict[str, Any]:
        """The figures of the model quantized by ``recipe``."""
        model = copy.deepcopy(self.model)
        plan = quantize_(model, recipe, calibration=self.data if _looks_at_data(recipe) else None)
        sizes = [math.prod(layer.shape) for layer in plan.quantized]
        bits = sum(layer.bits_per_weight * size for layer, size in zip(plan.quantized, sizes, strict=True)) / sum(sizes)
        row = {"scheme": scheme, "recipe": recipe, "by": "lowbit", "bits_per_weight": bits, "device": self.device}
        return {**row, **self.figures(model)}

    def peer_row(self, folder: Path) -> dict[str, Any]:
        """The figures of what a peer made of the model."""
        from safetensors.torch import load_file

        peer = json.loads((folder / "peer.json").read_text(encoding="utf-8"))
        if peer["length"] != self.context:
            raise ValueError(f"{folder} was calibrated on rows of {peer['length']} tokens, not {self.context}: make it anew")
        model = copy.deepcopy(self.model)
        missing, extra = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        if extra or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"{folder} holds another model's weights: {', '.join([*missing, *extra])[:200]}")
        inputs = load_file(folder / "inputs.safetensors") if (folder / "inputs.safetensors").exists() else {}
        if peer["int8_inputs"]:
            _round_inputs(model, inputs)
        facts = {name: peer[name] for name in ("scheme", "bits_per_weight", "rows")}
        return {**facts, "recipe": peer["peer"], "by": peer["version"], **self.figures(model)}

    def figures(self, model: nn.Module, compare: bool = True) -> dict[str, Any]:
        """The perplexity of ``model`` and, with ``compare``, its divergence from the float one."""
        value = perplexity(model, self.tokenizer, self.text, context=self.context, limit=self.chunks).value
        return {"perplexity": value, "divergence": divergence(model, self._float()).to_dict() if compare else None}

    def _float(self) -> Reference:
        if self._reference is None:
            chunks = windows_of(self.tokenizer, self.text, self.context, limit=self._compared)
            self._reference = Reference.collect(self.model, chunks)
        return self._reference


def _round_inputs(model: nn.Module, factors: dict[str, Tensor]) -> None:
    """Every linear layer but the head reads int8 with a scale a token, after its input was multiplied by its factors."""
    scheme = Scheme("int8", group_size=-1, scale="fp32")

    def hook(factor: Tensor | None) -> Callable[..., Any]:
        def rounded(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (x,) = args
            rows = (x if factor is None else x * factor).flatten(0, -2)
            return (QTensor.quantize(rows, scheme, method="absmax").dequantize().view(x.shape),)

        return rounded

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():  # type: ignore[operator]
            module.register_forward_pre_hook(hook(factors.get(name)))


def _looks_at_data(recipe: str) -> bool:
    """Whether data could change what comes of it; without, the model need not run."""
    found = Recipe.parse(recipe)
    rounders = {rule.config.rounder for rule in found.rules if rule.config is not None}
    return bool(found.needs_data or found.rewrites) or "clip" in rounders


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _earlier_rows(path: Path, material: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["material"] != material:
        raise SystemExit(f"{path} holds figures of other material ({found['material']}): give another --out")
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def _sorted(rows: Sequence[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """By scheme, ours before peers, from far to near."""
    places = {name: i for i, name in enumerate(("float", *order))}

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return places.get(row["scheme"], len(places)), row["by"] != "lowbit", -(row["divergence"] or {"kl": 0})["kl"]

    return sorted(rows, key=key)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure every method and scheme on a real model, beside peers.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file to predict")
    parser.add_argument("--calibration", type=Path, required=True, help="UTF-8 file that methods may look at")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that quality_peers.py made")
    parser.add_argument("--recipes", help="scheme:recipe with commas between, instead of all: 'int3:gptq(int3)'")
    parser.add_argument("--rows", type=int, default=128, help="rows to calibrate on")
    parser.add_argument("--context", type=int, default=512, help="tokens of a row and of a chunk")
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--compared", type=int, default=COMPARED, help="chunks on which the divergence is measured")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--anew", action="store_true", help="measure what the file holds already, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.json", help="JSON file to write, and to go on with")
    o = parser.parse_args(arguments)
    every = [(scheme, recipe) for scheme, recipes in RECIPES.items() for recipe in recipes]
    if o.recipes is not None:
        every = [(scheme, recipe) for scheme, _, recipe in (item.partition(":") for item in split_recipes(o.recipes) if item)]
    with Bench(o.model, o.text, o.calibration, o.rows, o.chunks, o.compared, o.context, o.device) as bench:
        rows = _measured(bench, o.out, o.peers, every, o.anew)
    print(quality_table([{"material": bench.material, "rows": rows}]))


def _measured(
    bench: Bench, out: Path, peers: Sequence[Path], every: Sequence[tuple[str, str]], remeasure: bool
) -> list[dict[str, Any]]:
    """The rows of ``out``, with those that it did not hold, or all that were asked for ``remeasure``."""
    rows = {(row["recipe"], row["scheme"]): row for row in _earlier_rows(out, bench.material)}

    def add(name: tuple[str, str], measure: Callable[[], dict[str, Any]]) -> None:
        if name in rows and not remeasure:
            return
        rows[name] = row = measure()
        far = row["divergence"] or {"kl": 0.0}
        print(f"{row['scheme']:6} {row['recipe']:30} {row['perplexity']:10.3f} {far['kl']}", flush=True)
        write_result(out, {"material": bench.material, "rows": _sorted(list(rows.values()), list(RECIPES))})

    add(("float", "float"), bench.float_row)
    for folder in peers:
        peer = json.loads((folder / "peer.json").read_text(encoding="utf-8"))
        add((peer["peer"], peer["scheme"]), partial(bench.peer_row, folder))
    for scheme, recipe in every:
        add((recipe, scheme), partial(bench.lowbit_row, scheme, recipe))
    return _sorted(list(rows.values()), list(RECIPES))


if __name__ == "__main__":
    main()
