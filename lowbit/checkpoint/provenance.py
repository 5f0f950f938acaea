"""By which method the weights in a folder are quantized already, read from its configuration and from its tensors' names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["by_config", "by_names", "remedy"]

_MAX_CONFIG = 10_000_000  # bytes: far more than any has

# Files in which methods describe themselves, and under which key; config.json comes first.
_FILES = (
    ("config.json", "quantization_config"),
    ("config.json", "compression_config"),
    ("quantize_config.json", None),  # GPTQ
    ("quant_config.json", None),  # AWQ
    ("hf_quant_config.json", "quantization"),  # ModelOpt
)
_METHODS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}

# What a configuration may say of how many bits and how they are scaled, in the order in which it is told.
_DETAILS = {
    "bits": "{} bits", "w_bit": "{} bits", "nbits": "{} bits", "num_bits": "{} bits", "bnb_4bit_quant_type": "{}",
    "weights": "{}", "quant_algo": "{}", "format": "{}", "fmt": "{}", "weight_block_size": "blocks of {}",
    "group_size": "group_size {}", "q_group_size": "group_size {}",
}  # fmt: skip

# Ends of names that stored codes and their scales have, the longest first where one ends in another.
_LEAVES = (
    ("weight_scale_inv", "fp8 in blocks"),
    ("qzeros", "gptq or awq"),
    ("qweight", "gptq or awq"),
    ("weight_packed", "compressed-tensors"),
    ("weight_scale_2", "nvfp4"),
    ("quant_state.bitsandbytes__nf4", "bitsandbytes (4 bits, nf4)"),
    ("quant_state.bitsandbytes__fp4", "bitsandbytes (4 bits, fp4)"),
    ("weight.absmax", "bitsandbytes (4 bits)"),
    ("SCB", "bitsandbytes (8 bits)"),
    ("_blocks", "mxfp4"),
    ("W_q", "hqq"),
    ("packed", "lowbit"),
    ("weight_scale", "fp8 or int8 with scales"),
)

# Methods whose codes transformers turns into floats as it loads them, and the configuration that asks for it.
_DEQUANTIZED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def by_config(folder: Path) -> str | None:
    """The method that the files of ``folder`` name, in words such as ``gptq (4 bits, group_size 128)``; None for none."""
    for name, key in _FILES:
        content = _read(folder / name)
        found = content if key is None else _nested(content, key)
        if found:
            return _described(found, _METHODS.get(name, "a method that its configuration does not name"))
    return None


def by_names(names: Iterable[str]) -> str | None:
    """The method that writes tensors of such ``names``; None where no method is known by them."""
    found = list(names)
    return next((method for leaf, method in _LEAVES if any(_ends_in(name, leaf) for name in found)), None)


def remedy(method: str) -> str:
    """What to give in place of a model that is quantized by ``method``, as one of the functions above tells it."""
    name = method.split(" ")[0]
    if name == "lowbit":
        return "give the float model that it was made from (lowbit inspect shows what it holds)"
    kind = _DEQUANTIZED.get(name)
    if kind is not None:
        return (
            "give the float model that it was made from, or the one that transformers makes of it "
            f"(from_pretrained with quantization_config={kind}(dequantize=True), then save_pretrained)"
        )
    return "give the float model that it was made from"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # whoever loads the model says what is wrong with it
    return content if isinstance(content, dict) else {}


def _nested(content: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """What stands under ``key``, or under it in the configuration of a part (``text_config``)."""
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    return next((part[key] for part in parts if isinstance(part.get(key), dict) and part[key]), None)


def _described(config: Mapping[str, Any], unnamed: str) -> str:
    method = str(config.get("quant_method") or unnamed)
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        method = "bitsandbytes"
    details = [words.format(config[key]) for key, words in _DETAILS.items() if isinstance(config.get(key), (str, int, list))]
    if method == "bitsandbytes":
        bits = "8 bits" if config.get("load_in_8bit") else "4 bits"
        details = [bits, *details] if bits == "4 bits" else [bits]
    details = [detail for detail in dict.fromkeys(details) if detail != method]
    return method + (f" ({', '.join(details)})" if details else "")


def _ends_in(name: str, leaf: str) -> bool:
    return name.endswith(leaf) and (leaf.startswith("_") or name == leaf or name[-len(leaf) - 1] in "._")
