"""What MODEL may be on the command line: a folder or a hub id, float or quantized."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lowbit.recipe import Recipe

__all__ = [
    "DeviceOption",
    "is_quantized",
    "load_model",
    "load_tokenizer",
    "outline",
    "parse_recipe",
    "quiet_transformers",
    "split",
]


def _usable(device: str | None) -> str | None:
    """A device that cannot be used is a mistake in the command line, said before anything is loaded."""
    if device is not None:
        from lowbit.environment import usable_device

        try:
            usable_device(device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return device


DeviceOption = Annotated[str | None, typer.Option(help="Where to work: cpu, cuda, cuda:1.", callback=_usable)]


def split(text: str) -> list[str]:
    """The names in ``text`` with commas between; those within brackets part options, as in ``int3,gptq(int3, damping=0.02)``."""
    return [name.strip() for name in re.split(r",(?![^(]*\))", text) if name.strip()]


def parse_recipe(text: str) -> Recipe:
    """The recipe that ``--recipe`` names; a name that means nothing is a mistake in the command line (exit code 2)."""
    from lowbit import Recipe

    try:
        return Recipe.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def is_quantized(model: str) -> bool:
    """Whether ``model`` is a folder that lowbit wrote with quantized weights."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return config["quantization_config"]["quant_method"] == "lowbit"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def quiet_transformers() -> Any:
    """The module transformers, which from now on draws no bars and prints no advice: stderr is ours."""
    try:
        import transformers
    except ImportError:
        raise ImportError("this command needs transformers: pip install 'lowbit[models]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return transformers


def load_model(model: str, device: str | None = None) -> Any:
    """The transformers model ``model`` in the dtype of its files, in evaluation mode, on ``device``."""
    transformers = quiet_transformers()
    if is_quantized(model):
        import lowbit

        return lowbit.load(model, device=device)
    kind = _kind(transformers, _config(transformers, model))
    loaded = kind.from_pretrained(model, dtype="auto").eval()
    return loaded if device is None else loaded.to(device)


def outline(model: str) -> Any:
    """``model`` without its numbers, from its configuration alone: enough for a plan, and nothing is downloaded for it.

    A quantized one is loaded.
    """
    if is_quantized(model):
        return load_model(model)
    import torch

    transformers = quiet_transformers()
    config = _config(transformers, model)
    with torch.device("meta"):
        return _kind(transformers, config)._from_config(config)


def load_tokenizer(model: str) -> Any:
    """The tokenizer of ``model``. Raises ``ValueError`` that names a model without one."""
    transformers = quiet_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:160]
        raise ValueError(
            f"{model} has no tokenizer that can be read: put tokenizer.json and tokenizer_config.json beside its weights ({why})"
        ) from None


def _config(transformers: Any, model: str) -> Any:
    if not Path(model).exists() and (Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1):
        raise FileNotFoundError(f"no folder {model}")
    return transformers.AutoConfig.from_pretrained(model)


def _kind(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, which may be other than a language model."""
    names = getattr(config, "architectures", None) or [""]
    found = getattr(transformers, names[0], None)
    return found if isinstance(found, type) and hasattr(found, "_from_config") else transformers.AutoModelForCausalLM
