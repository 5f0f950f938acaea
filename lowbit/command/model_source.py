"""What MODEL may be on the command line: a folder or a hub id, float or quantized."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import note

if TYPE_CHECKING:
    from lowbit.recipe import Recipe

__all__ = [
    "DeviceOption",
    "check_model",
    "checked_kind",
    "is_quantized",
    "load_model",
    "load_tokenizer",
    "usage_errors",
    "outline",
    "parse_recipe",
    "quantized_by",
    "quiet_transformers",
    "split",
    "usable",
]


def usable(device: str | None) -> str | None:
    """A device that cannot be used is a mistake in the command line, said before anything is loaded."""
    if device is not None:
        from lowbit.environment import usable_device

        try:
            usable_device(device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return device


DeviceOption = Annotated[str | None, typer.Option(help="Where to work: cpu, cuda, cuda:1.", callback=usable)]


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


def check_model(model: str, floats: bool = True) -> None:
    """Refuse what is no model, before anything is loaded (exit code 2); ``floats``: a quantized one as well."""
    path = Path(model)
    if path.is_dir():
        _check_folder(path)
        if floats and (method := quantized_by(path)) is not None:
            from lowbit.checkpoint.provenance import remedy

            raise typer.BadParameter(f"{model} is quantized already, as {method}: {remedy(method)}")
    elif path.exists():
        raise typer.BadParameter(f"{model} is a file: give the folder that holds config.json and the weights")
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise typer.BadParameter(f"no folder {model}")


def _check_folder(path: Path) -> None:
    config = path / "config.json"
    if config.is_file():
        from lowbit.checkpoint.tensor_file import parse_json

        parse_json(config.read_bytes(), str(config))
        return
    if (path / "adapter_config.json").is_file():
        raise typer.BadParameter(f"{path} holds an adapter alone: merge it into its model, and give what save_pretrained writes")
    raise typer.BadParameter(f"{path} holds no config.json: give a folder that save_pretrained or lowbit wrote")


def quantized_by(folder: Path) -> str | None:
    """The method by which the weights in ``folder`` are quantized; None for floats."""
    from lowbit.checkpoint.provenance import by_config

    return by_config(folder)


def is_quantized(model: str) -> bool:
    """Whether ``model`` is a folder that lowbit wrote with quantized weights."""
    return (quantized_by(Path(model)) or "").split(" ")[0] == "lowbit"


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


def load_model(model: str, device: str | None = None, kind: Any = None) -> Any:
    """The transformers model ``model`` in the dtype of its files, in evaluation mode, on ``device``.

    ``kind``: its class, from :func:`checked_kind`, where it is loaded more than once.
    """
    quiet_transformers()
    if is_quantized(model):
        import lowbit

        return lowbit.load(model, device=device)
    kind = kind or checked_kind(model)
    with _named_errors(model):
        loaded = kind.from_pretrained(model, dtype="auto").eval()
    return loaded if device is None else loaded.to(device)


def checked_kind(model: str) -> Any:
    """The class of ``model``. A float one is compared with its files before: a tensor that they lack would be random."""
    transformers = quiet_transformers()
    config = _config(transformers, model)
    path = Path(model) if Path(model).is_dir() else _hub_folder(model)
    return type(_checked(model)) if quantized_by(path) is None else _kind(transformers, config)


def outline(model: str) -> Any:
    """``model`` without its numbers: enough for a plan. A folder's weights are compared with it, by their names and shapes;
    of a hub id nothing but the configuration is downloaded."""
    quiet_transformers()
    from lowbit.checkpoint.hf_config import build_on_meta
    from lowbit.pretrained.float_folder import check_float, holds_weights

    if not Path(model).is_dir():
        made = _hub_outline(model)
        with usage_errors():
            check_float(_hub_folder(model))
        return made
    if not holds_weights(Path(model)):
        note(f"{model} holds no weights: told from its config.json alone")
        return build_on_meta(Path(model))
    return _checked(model)


def _checked(model: str) -> Any:
    """The outline of a float model, once nothing speaks against its files."""
    from lowbit.pretrained.float_folder import check_folder, outline_of

    with usage_errors():
        if Path(model).is_dir():
            made, warnings = outline_of(Path(model))
        else:
            made = _hub_outline(model)
            with _named_errors(model):
                type(made).from_pretrained(model, device_map="meta")  # downloads it
            warnings = check_folder(_hub_folder(model), made)
    for remark in warnings:
        note(remark)
    return made


def _hub_outline(model: str) -> Any:
    import torch

    transformers = quiet_transformers()
    from lowbit.pretrained.default_exclusions import apply_fp32_modules

    config = _config(transformers, model)
    with torch.device("meta"):
        found = _kind(transformers, config)._from_config(config)
    apply_fp32_modules(found, found.config.dtype)
    return found


def _hub_folder(model: str) -> Path:
    from transformers.utils import cached_file  # type: ignore[attr-defined]

    found: Any = cached_file(model, "config.json")
    return Path(found).parent


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Within the block a model that is quantized where a float one is asked for is a mistake in the command line."""
    from lowbit.pretrained.float_folder import QuantizedError

    try:
        yield
    except QuantizedError as error:
        raise typer.BadParameter(str(error)) from None


@contextlib.contextmanager
def _named_errors(model: str) -> Iterator[None]:
    """Within the block an error of transformers says which model it is about."""
    from lowbit import CheckpointError

    try:
        yield
    except Exception as error:  # a model can fail in as many ways as there are
        raise CheckpointError(f"{model}: transformers cannot load it ({type(error).__name__}: {error!s:.300})") from error


def load_tokenizer(model: str) -> Any:
    """The tokenizer of ``model``. Raises ``ValueError`` that names a model without one."""
    transformers = quiet_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"{model} has no tokenizer that can be read: put tokenizer.json and tokenizer_config.json beside its weights "
            f"({reason})"
        ) from None


def _config(transformers: Any, model: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(model)
    except Exception as error:
        if Path(model).exists():
            raise ValueError(f"{model}: no model can be built from its config.json ({error!s:.300})") from error
        raise typer.BadParameter(f"no folder {model}, and the hub gives no model of that name ({error!s:.300})") from None


def _kind(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, which may be other than a language model."""
    names = getattr(config, "architectures", None) or [""]
    found = getattr(transformers, names[0], None)
    return found if isinstance(found, type) and hasattr(found, "_from_config") else transformers.AutoModelForCausalLM
