"""Rounding the matrices of a weight [E, N, K] one by one, each with the statistics of the tokens that reached its expert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .algorithms import ROUNDERS
from .layer_config import LayerConfig
from .rounding import RoundedWeight, round_weight
from .statistics import Statistics, relative
from .tensor import QTensor

__all__ = ["RoundedExpert", "join_experts", "round_expert", "round_experts"]

_NAMED = 8  # experts that a note names


class RoundedExpert(NamedTuple):
    """A matrix on the grid; the squared error and the square of all that it gave for its ``tokens``, and what to know of it."""

    weight: QTensor
    noise: float = 0.0
    signal: float = 0.0
    tokens: int = 0
    notes: tuple[str, ...] = ()


def round_expert(
    matrix: Tensor, config: LayerConfig, statistics: Statistics | None, dtype: torch.dtype | None = None
) -> RoundedExpert:
    """``matrix`` [N, K] rounded with ``statistics``, or as where there is no data if they are of fewer rows than the rounder
    wants (:attr:`~lowbit.algorithms.Rounder.rows_per_channel`)."""
    usable = statistics if statistics is not None and statistics.count >= _least(config, matrix.shape[1]) else None
    rounded = round_weight(matrix, config, usable, dtype)
    if statistics is None:
        return RoundedExpert(rounded.weight, notes=rounded.notes)
    dense = rounded.weight.dequantize(torch.promote_types(matrix.dtype, torch.float32))
    noise, signal = statistics.to(matrix.device).output_energies(matrix, dense)
    return RoundedExpert(rounded.weight, noise * statistics.count, signal * statistics.count, statistics.count, rounded.notes)


def join_experts(experts: Sequence[RoundedExpert], config: LayerConfig, calibrated: bool = False) -> RoundedWeight:
    """The weight [E, N, K] of ``experts``, the error of all that they gave, and which of them too few tokens reached where there
    was data (``calibrated``)."""
    weight = cast(QTensor, torch.stack([expert.weight for expert in experts]))
    tokens = [expert.tokens for expert in experts]
    loss = relative(sum(e.noise for e in experts), sum(e.signal for e in experts)) if any(tokens) else None
    notes = list(_notes_on_tokens(tokens, config, weight.shape[-1])) if calibrated else []
    by_note: dict[str, list[int]] = {}
    for i, expert in enumerate(experts):
        for note in expert.notes:
            by_note.setdefault(note, []).append(i)
    notes += [note if len(found) == len(experts) else f"{_named(found)}: {note}" for note, found in by_note.items()]
    return RoundedWeight(weight, loss, tuple(notes))


def round_experts(
    weight: Tensor,
    config: LayerConfig,
    statistics: Sequence[Statistics | None] | None = None,
    dtype: torch.dtype | None = None,
    calibrated: bool = False,
) -> RoundedWeight:
    """``weight`` [E, N, K] rounded matrix by matrix: :func:`round_expert` and :func:`join_experts`."""
    found = [None] * len(weight) if statistics is None else statistics
    parts = [round_expert(matrix, config, each, dtype) for matrix, each in zip(weight, found, strict=True)]
    return join_experts(parts, config, calibrated)


def _least(config: LayerConfig, k: int) -> int:
    rounder = ROUNDERS[config.rounder]
    return math.ceil(rounder.rows_per_channel * k) if rounder.uses_statistics else 0


def _notes_on_tokens(tokens: Sequence[int], config: LayerConfig, k: int) -> Iterator[str]:
    least, rounder = _least(config, k), ROUNDERS[config.rounder]
    how = "rounded to nearest, scales=mse" if rounder.needs_statistics else "rounded without"
    unreached = [i for i, count in enumerate(tokens) if not count]
    few = [i for i, count in enumerate(tokens) if 0 < count < least]
    if unreached:
        yield f"no calibration data reached {_named(unreached)} of {len(tokens)}: {how}"
    if few:
        fewest = min(tokens[i] for i in few)
        yield (
            f"fewer than {least} tokens ({rounder.rows_per_channel:g} for each of {k} channels) reached "
            f"{_named(few)} of {len(tokens)}, {fewest} the fewest: {how}"
        )


def _named(experts: Sequence[int]) -> str:
    shown = ", ".join(map(str, experts[:_NAMED]))
    more = f" and {len(experts) - _NAMED} more" if len(experts) > _NAMED else ""
    return f"expert{'s' if experts[1:] else ''} {shown}{more}"
