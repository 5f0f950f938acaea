"""What a way to rewrite a model is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..options import keyword_options
from ..torch_state import isolated

__all__ = ["KINDS", "Method"]

KINDS = ("model", "block")


@dataclass(frozen=True)
class Method:
    """A way to turn a float model into a float model that gives the same and is easier to quantize.

    Attributes:
        run: it runs :func:`~lowbit.torch_state.isolated`, whatever the caller has set for torch. Of the kind ``"model"``,
            ``run(model, batches, **options)`` changes ``model`` in place, before its layers are planned and calibrated, and
            gives notes for the plan in plain sentences. ``batches`` are those of the calibration
            (:class:`~lowbit.calibration.data.Batch`), none where there is no data. Of the kind ``"block"``,
            ``run(pool, **options)`` chooses what the shared input of some layers is divided by: a
            :class:`~lowbit.rewrites.search.Choice` for a :class:`~lowbit.rewrites.search.Pool`.
        kind: ``"model"`` (before everything, on the float model) or ``"block"`` (between collecting the statistics of a
            block's layers and rounding them).
        needs_data: whether there has to be calibration data. Every one of the kind ``"block"`` needs it.
        check: ``check(**options)`` raises ``ValueError`` for values that the options cannot take, before any work.
    """

    run: Callable[..., Any]
    kind: str
    needs_data: bool = True
    check: Callable[..., None] = lambda **options: None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        object.__setattr__(self, "run", isolated()(self.run))

    @property
    def options(self) -> dict[str, Any]:
        """The options that :attr:`run` takes, by name, with their defaults; and of a block's, ``insert``: whether a module
        divides inputs where nothing before them can."""
        return {**keyword_options(self.run), **({"insert": True} if self.kind == "block" else {})}
