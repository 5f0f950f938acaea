"""What transformers' loader says of the files that it puts into a model: which tensors lack, are left over or do not fit.

``from_pretrained`` fills what lacks with random numbers and goes on. It tells of it in a log, and hands it to one method of
the model at the end of each load, in transformers from 5.9 to 5.23: a subclass for the time of loading hears it there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.tensor_file import Spec

__all__ = ["Report", "report_of", "missing_report_error", "with_load_report"]

Shape = tuple[int, ...]
_METHOD = "_adjust_missing_and_unexpected_keys"


@dataclass(frozen=True)
class Report:
    """Names of tensors, sorted.

    Attributes:
        missing: that the model has and the files lack; not those that are tied to others, and not those that transformers
            does without in this class.
        unexpected: that the files have and the model lacks; not those that transformers passes over in this class.
        mismatched: of another shape, with the shapes in the files and in the model.
        unconverted: that the files have in pieces (experts one by one) which cannot be joined.
        absent: ``missing``, and those that transformers does without.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, Shape, Shape], ...] = ()
    unconverted: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.unconverted)


def with_load_report(kind: Any, on_report: Callable[[Any, Report], None], quiet: bool = False) -> Any:
    """``kind``, a class of transformers', whose objects call ``on_report(model, report)`` when they have been loaded.

    What ``on_report`` raises comes out of ``from_pretrained``. Behind it the loader logs the report, and raises for shapes that
    do not fit and pieces that cannot be joined, without naming them; ``quiet``: it does neither.
    """

    def adjust(self: Any, info: Any) -> None:
        absent = frozenset(info.missing_keys)
        getattr(kind, _METHOD)(self, info)
        report = _read(info, absent)
        try:
            on_report(self, report)
        except BaseException:
            _forget(info.mismatched_keys, info.conversion_errors)  # or another error would take the place of this one
            raise
        if quiet:
            _forget(info.mismatched_keys, info.conversion_errors, info.missing_keys, info.unexpected_keys)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, _METHOD: adjust})


def report_of(kind: Any, config: Any, specs: Mapping[str, Spec]) -> tuple[Report, Any]:
    """What the loader says of files that hold ``specs``, and the outline of the model of class ``kind`` that it makes of them.

    Nothing but names, dtypes and shapes takes part: the tensors that are loaded here are on the meta device.
    """
    reports: list[Report] = []
    kind = with_load_report(kind, lambda model, report: reports.append(report), quiet=True)
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    with _no_bars():
        model = kind.from_pretrained(
            None, config=copy.deepcopy(config), state_dict=tensors, device_map="meta", dtype=torch.float32
        )
    if not reports:
        raise missing_report_error()
    return reports[0], model


def missing_report_error() -> RuntimeError:
    """The error of a transformers that does not call the method which :func:`with_load_report` listens at."""
    import transformers

    return RuntimeError(f"transformers {transformers.__version__} does not tell which tensors it found: use one from 5.9 to 5.23")


def _read(info: Any, absent: frozenset[str]) -> Report:
    unconverted = sorted(info.conversion_errors)
    return Report(
        tuple(sorted(set(info.missing_keys) - set(unconverted))),
        tuple(sorted(info.unexpected_keys)),
        tuple(sorted((name, tuple(found), tuple(wanted)) for name, found, wanted in info.mismatched_keys)),
        tuple(unconverted),
        absent,
    )


def _forget(*found: Any) -> None:
    for names in found:
        names.clear()


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Within the block transformers draws no bar: nothing is loaded that takes long."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()
