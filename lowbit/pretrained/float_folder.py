"""A folder with a float model, looked at before a number is read: what would be random, lost or misread is refused by name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.header import is_quantized
from ..checkpoint.hf_config import build_on_meta
from ..checkpoint.provenance import by_config, by_names, remedy
from ..checkpoint.shards import INDEX, SINGLE, read_index
from ..checkpoint.tensor_file import CheckpointError, Spec, TensorFile
from .loading_report import Report, report_of

__all__ = ["QuantizedError", "check_codes", "check_float", "check_folder", "check_load", "holds_weights", "is_new", "outline_of"]

# In the order in which transformers looks for them.
_FILES = ((SINGLE, INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
_SHOWN = 3  # names of a kind in a message, which is one line
_MASKS = ("bias", "masked_bias")  # causal masks, which older releases of transformers stored in the modules of attention


class QuantizedError(ValueError):
    """A folder whose weights are quantized already, where a float model is asked for."""


def check_float(folder: Path) -> None:
    """Raises :class:`QuantizedError` that says as what, if ``folder`` says of itself that its weights are quantized."""
    method = by_config(folder)
    if method is not None:
        raise QuantizedError(f"{folder} is quantized already, as {method}: {remedy(method)}")


def outline_of(folder: Path) -> tuple[nn.Module, list[str]]:
    """The model that config.json in ``folder`` describes, on the meta device, and remarks; see :func:`check_folder`."""
    check_float(folder)
    model = build_on_meta(folder)
    return model, check_folder(folder, model)


def check_folder(folder: Path, model: Any) -> list[str]:
    """Compare the files in ``folder`` with ``model``, an outline of what its config.json describes; remarks on what is passed
    over: tensors that other classes of the same architecture read, as the head of another task.

    Raises :class:`QuantizedError` for weights that are quantized, and :class:`CheckpointError` for files that are absent, cut
    short or contradict their index, and, with the names, for tensors that are missing, unexpected or of another shape.
    """
    check_float(folder)
    model_class, config = type(model), model.config
    specs = stored(folder)
    report, _ = report_of(model_class, config, specs)
    _refuse_codes(folder, model, specs)
    left = _left_over(report, model, specs)
    _refuse(folder, model_class, report, left)
    saved_names = [name for name in report.unexpected if name not in left and not _is_mask(name, model)]
    return [f"passed over, as no part of a {model_class.__name__}: {_listed(saved_names)}"] if saved_names else []


def check_load(report: Report, model: Any, files: Sequence[str] | None) -> frozenset[str]:
    """Judge what the loader said when it put ``files`` into ``model``, of a class that the caller chose.

    Returns the names of tensors that are new in this class by its design, as a head for classification is: the files are whole
    as what their config.json describes, and that has none of these names. Raises as :func:`check_folder` for all others.
    """
    if report.is_clean:
        return report.absent
    model_class = type(model)
    saved_model = _saved_outline(files)
    if saved_model is None:
        specs = stored_in([Path(file) for file in files or ()])
        _refuse(Path(files[0]).parent if files else "the state_dict", model_class, report, _left_over(report, model, specs))
        return report.absent
    assert files
    folder = Path(files[0]).parent
    check_folder(folder, saved_model)
    wrong = Report(
        missing=tuple(name for name in report.missing if not is_new(name, model, saved_model)),
        mismatched=tuple(entry for entry in report.mismatched if _is_in_base(entry[0], model)),
        unconverted=report.unconverted,
    )
    _refuse(folder, model_class, wrong, [])
    return report.absent | {name for name, *_ in report.mismatched}


def check_codes(files: Sequence[str], model: Any) -> None:
    """Raises :class:`QuantizedError` for ``files`` that hold codes where ``model``, an outline, has floats."""
    folder = Path(files[0]).parent
    check_float(folder)
    _refuse_codes(folder, model, stored_in([Path(file) for file in files]))


# ---- files -------------------------------------------------------------------------------------------------------


def holds_weights(folder: Path) -> bool:
    """Whether ``folder`` has files with tensors, or an index of some."""
    return any((folder / name).exists() for pair in _FILES for name in pair)


def stored(folder: Path) -> dict[str, Spec]:
    """The tensors in the files of ``folder`` that transformers would load. Raises :class:`CheckpointError`."""
    for single, index in _FILES:
        if (folder / single).exists():
            return stored_in([folder / single])
        if (folder / index).is_file():
            places = read_index(folder / index, single.rpartition(".")[2])
            names = sorted(set(places.values()))
            absent = [name for name in names if not (folder / name).is_file()]
            if absent:
                raise CheckpointError(
                    f"{folder}: {index} lists {_listed(absent)}, and the folder lacks it: copy the whole folder"
                )
            return stored_in([folder / name for name in names], places)
    wanted = " nor ".join(name for pair in _FILES for name in pair)
    raise CheckpointError(f"{folder}: holds neither {wanted}: give the folder of a float model with its weights")


def stored_in(files: Sequence[Path], places: Mapping[str, str] | None = None) -> dict[str, Spec]:
    """The tensors in ``files``, the later ones before those of the same name; ``places``: where an index has them."""
    specs: dict[str, Spec] = {}
    file_of: dict[str, str] = {}
    for file in files:
        found = _specs(file)
        specs |= found
        file_of |= dict.fromkeys(found, file.name)
    for name, home in (places or {}).items():
        if file_of.get(name) != home:
            description = "none of the files holds it" if name not in file_of else f"{file_of[name]} holds it"
            raise CheckpointError(f"{files[0].parent / home}: tensor {name} is listed there by the index, and {description}")
    return specs


def _specs(file: Path) -> dict[str, Spec]:
    if file.suffix == ".safetensors":
        opened = TensorFile(file)
        opened.close()
        if is_quantized(opened.metadata, file):
            raise QuantizedError(f"{file} is quantized already, as lowbit: {remedy('lowbit')}")
        return opened.specs
    try:
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        return {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    except Exception as error:  # pickles fail in as many ways as there are
        raise CheckpointError(f"{file}: cannot be read ({type(error).__name__}: {error!s:.200})") from error


# ---- judging -----------------------------------------------------------------------------------------------------


def _refuse(where: Any, model_class: type, report: Report, unexpected: Sequence[str]) -> None:
    """Raise what ``report`` says, with the names; of what is unexpected ``unexpected`` alone."""
    shapes = [f"{name} {list(found)} for {list(wanted)}" for name, found, wanted in report.mismatched]
    parts = {
        "missing from the files": report.missing,
        "in pieces that cannot be joined": report.unconverted,
        "of another shape in the files": shapes,
        "in the files, and unknown to the model": unexpected,
    }
    problems = "; ".join(f"{description}: {_listed(names)}" for description, names in parts.items() if names)
    if not problems:
        return
    method = by_names(unexpected)
    if method is not None:
        raise QuantizedError(
            f"{where} is quantized already, as {method}: its files hold {_listed(unexpected)}, and its config.json names no "
            f"method; {remedy(method)}"
        )
    raise CheckpointError(
        f"{where}: its files are not those of a {model_class.__name__}, as which it is to be loaded: {problems}"
    )


def _refuse_codes(folder: Path, model: Any, specs: Mapping[str, Spec]) -> None:
    """Integers where the model has floats are codes, whose scales nobody applies."""
    model_class = type(model)
    saved_names = {_without_prefix(name, model_class): tensor for name, tensor in model.state_dict().items()}
    codes = {name: spec for name, spec in specs.items() if not (spec.dtype.is_floating_point or spec.dtype.is_complex)}
    found = [
        f"{name} of {spec}" for name, spec in codes.items() if _is_float(saved_names.get(_without_prefix(name, model_class)))
    ]
    if found:
        method = by_names(name for name in specs if _without_prefix(name, model_class) not in saved_names) or "integers"
        raise QuantizedError(
            f"{folder} is quantized already, as {method}: its files hold {_listed(found)}, where the model has floats, and its "
            f"config.json names no method; {remedy(method)}"
        )


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()


def _left_over(report: Report, model: Any, specs: Mapping[str, Spec]) -> list[str]:
    """What is unexpected and of no use to any class of this architecture."""
    left = [name for name in report.unexpected if not _is_mask(name, model)]
    if not left:
        return []
    model_class, config = type(model), model.config
    for other in vars(sys.modules.get(model_class.__module__, sys)).values():
        if left and _is_sibling(other, model_class, config):
            with contextlib.suppress(Exception):  # a class that this configuration does not describe
                left = sorted({*left} & {*report_of(other, config, specs)[0].unexpected})
    return left


def _is_sibling(other: Any, model_class: type, config: Any) -> bool:
    import transformers

    return (
        isinstance(other, type)
        and issubclass(other, transformers.PreTrainedModel)
        and other is not model_class
        and other.__module__ == model_class.__module__
        and getattr(other, "config_class", None) is type(config)
        and other.forward is not nn.Module.forward  # the base of all others
    )


def _is_mask(name: str, model: Any) -> bool:
    path, _, leaf = name.rpartition(".")
    if leaf not in _MASKS:
        return False
    for home in (path, f"{model.base_model_prefix}.{path}"):
        with contextlib.suppress(AttributeError):
            module = model.get_submodule(home)
            return not module._parameters and any(True for _ in module.children())
    return False


def _is_in_base(name: str, model: Any) -> bool:
    """Whether the tensor ``name`` is none of a head, whose shape a caller may want to change."""
    if model.base_model is not model:
        return name.startswith(f"{model.base_model_prefix}.")
    return any(part.isdigit() for part in name.split("."))  # within a block


def _saved_outline(files: Sequence[str] | None) -> Any:
    """The model that the folder of ``files`` itself says it holds; None where it does not say."""
    folder = None if not files else Path(files[0]).parent
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        return build_on_meta(folder)
    except CheckpointError:  # code of its own, which is not run here
        return None


def is_new(name: str, model: Any, saved_model: Any) -> bool:
    """Whether the tensor ``name`` of ``model`` is new by its class: a head, or a part below it, that ``saved_model``, the model
    that was saved, has not at all."""
    if type(model.config) not in (type(saved_model.config), *(getattr(saved_model.config, "sub_configs", None) or {}).values()):
        return False
    saved_names = {_without_prefix(found, type(saved_model)) for found in saved_model.state_dict()}
    unprefixed = _without_prefix(name, type(model))
    if model.base_model is not model and not name.startswith(f"{model.base_model_prefix}."):
        return unprefixed not in saved_names
    return unprefixed.partition(".")[0] not in {found.partition(".")[0] for found in saved_names}


def _without_prefix(name: str, model_class: Any) -> str:
    """``name`` without the prefix that models with a head put before the names of the model below it."""
    return name.removeprefix(f"{model_class.base_model_prefix}.")


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
