"""The model card of a quantized folder: README.md, which says to people what the files are and how they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["drop_card", "write_card"]

CARD = "README.md"
_GENERATED_MARK = "<!-- written by lowbit, which replaces this file when it saves here again: delete this line to keep it -->"
_IS_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(config_folder: Path, destination: Path) -> None:
    """Write the card of the model whose config.json is in ``config_folder``, into that folder, from which it goes to
    ``destination``.

    Nothing is written for a model that is not quantized, and where a card is that somebody else wrote.
    """
    if any(path.exists() and not _is_generated(path) for path in (config_folder / CARD, destination / CARD)):
        return
    config = json.loads((config_folder / "config.json").read_text(encoding="utf-8"))
    quantization_config = config.get("quantization_config") or {}
    if quantization_config.get("quant_method") == "lowbit":
        (config_folder / CARD).write_text(_text(config, quantization_config), encoding="utf-8")


def drop_card(destination: Path) -> None:
    """Remove the card that lowbit wrote into ``destination`` of a model that a float one has replaced."""
    if _is_generated(destination / CARD):
        (destination / CARD).unlink()


def _is_generated(path: Path) -> bool:
    return path.is_file() and _GENERATED_MARK in path.read_text(encoding="utf-8", errors="replace")


def _text(config: Mapping[str, Any], quantization_config: Mapping[str, Any]) -> str:
    kind = next(iter(config.get("architectures") or ()), "AutoModel")
    base = str(quantization_config.get("base_model") or "")
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["lowbit"]}
    if _IS_HUB_NAME.fullmatch(base):
        head |= {"base_model": base, "base_model_relation": "quantized"}
    written = quantization_config.get("recipe") or {}
    recipe: Mapping[str, Any] = written if isinstance(written, Mapping) else {"name": str(written)}
    rows = {
        "base model": base or "not recorded",
        "class": f"`{kind}`",
        "recipe": f"`{recipe['name']}`, below" if recipe.get("name") else "below" if recipe else "not recorded",
        "bits a weight": f"{quantization_config['bits_per_weight']:.3f}, in the layers that are quantized"
        if "bits_per_weight" in quantization_config
        else "",
        "calibration": _calibration(quantization_config.get("calibration")),
        "made with": f"lowbit {quantization_config.get('lowbit_version', 'of a version that is not recorded')}",
        "format of the files": f"version {quantization_config.get('version')}",
        "saved with": f"transformers {config['transformers_version']}" if "transformers_version" in config else "",
    }
    load = f'model = {kind}.from_pretrained(".")  # this folder, or its name on the hub'
    lines = [
        "---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", "", _GENERATED_MARK, "", f"# {base or kind}, quantized", "",
        "Weights quantized by lowbit. With it transformers (5.9 or newer) loads them; alone it raises for their shapes.", "",
        "```python", "import lowbit", f"from transformers import {kind}", "", load, "```", "",
        '`lowbit.load(".")` gives the same model, and `lowbit inspect .` shows scheme and bytes of each layer.', "",
        "| | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows.items() if value),
    ]  # fmt: skip
    if recipe:
        lines += ["", "The recipe, as `lowbit quantize --recipe FILE` reads it:", "", "```yaml"]
        lines += [yaml.safe_dump({name: recipe[name] for name in recipe if recipe[name]}, sort_keys=False).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _calibration(quantization_config: Any) -> str:
    if not isinstance(quantization_config, Mapping):
        return "none: rounded without data"
    return ", ".join(f"{quantization_config[what]:,} {what}" for what in ("rows", "tokens") if what in quantization_config)
