"""A transformers model without its numbers: how its configuration is written beside the tensors and read back."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..quantized_module import QuantizedModule
from .tensor_file import CheckpointError, parse_json

__all__ = ["build_on_meta", "float_dtype", "is_pretrained", "read_quantization_config", "write_config"]

CONFIG = "config.json"
_GENERATION = "generation_config.json"
_MAX_CONFIG = 10_000_000  # bytes: far more than any has


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers' (which is then imported already)."""
    home = sys.modules.get("transformers.modeling_utils")
    return home is not None and isinstance(model, home.PreTrainedModel)


def write_config(model: nn.Module, folder: Path, quantization_config: Mapping[str, Any] | None = None) -> None:
    """Write config.json and generation_config.json, from which :func:`build_on_meta` makes the model again.

    A quantized model's has ``quantization_config`` under ``quantization_config``: its method, by which other programs see that
    they cannot read its tensors, and how it was made.
    """
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = float_dtype(model)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    if quantization_config is not None:
        path = folder / CONFIG
        content = json.loads(path.read_text(encoding="utf-8"))
        content["quantization_config"] = dict(quantization_config)
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        # Not save_pretrained, which refuses settings that contradict each other, as those of published models do.
        generation.to_json_file(folder / _GENERATION, use_diff=True)


def read_quantization_config(folder: Path) -> dict[str, Any]:
    """What config.json in ``folder`` says of how the model was quantized; empty where there is none that can be read."""
    try:
        found = parse_json((folder / CONFIG).read_bytes(), CONFIG).get("quantization_config")
    except (OSError, CheckpointError):
        return {}
    return found if isinstance(found, dict) else {}


def float_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the float model: transformers takes that of the first parameter, which may be a scale's."""
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            return module.weight.dtype
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.get_default_dtype()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the block parameters have no numbers, whatever module is given them; buffers have theirs."""

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # as it is
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]  # may return a parameter
    try:
        yield
    finally:
        hook.remove()


def build_on_meta(folder: Path, real_buffers: bool = False) -> nn.Module:
    """The model that config.json in ``folder`` describes, on the meta device: no memory, no numbers.

    ``real_buffers``: with what the model itself computes (rotary frequencies), so that it can run once it has weights.

    Takes no code from the folder. Raises :class:`CheckpointError` that names the file.
    """
    path = folder / CONFIG
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _MAX_CONFIG):
            raise CheckpointError(f"{path}: is no file of a configuration, which has {_MAX_CONFIG} bytes at most")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}): give the float model as model=") from error
    names = parse_json(text, str(path)).get("architectures")
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{path}: needs transformers (pip install lowbit[models]), or the float model as model=") from error
    try:
        from ..pretrained.default_exclusions import apply_fp32_modules

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if hasattr(config, "quantization_config"):  # the header of the tensors says it better
            del config.quantization_config
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        found = getattr(transformers, name, None) if name.isidentifier() else None
        with _parameters_on_meta() if real_buffers else torch.device("meta"):
            if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
                model = found._from_config(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        apply_fp32_modules(model, model.config.dtype)
        if (folder / _GENERATION).is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a configuration can fail in as many ways as there are models
        raise CheckpointError(f"{path}: no model can be built from it ({type(error).__name__}: {error!s:.300})") from error
    return model
