"""The Gram matrix as the methods use it: damped, factorised, and what there is to say of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..statistics import Statistics

__all__ = ["Factor", "drift_target", "damped", "inverse_factor", "notes_on"]

_ROWS = 256  # of a matrix that are copied, and of a triangle that are inverted, at a time


def damped(gram: Tensor, damping: float) -> Tensor:
    """``gram`` [K, K] over the mean of its diagonal, with ``damping`` added to that; the identity where it is all zeros."""
    mean = gram.diagonal().mean(dtype=torch.float64)
    if not bool(mean > 0):
        return torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    out = gram / mean.to(gram.dtype)
    out.diagonal().add_(damping)
    return out


@dataclass(frozen=True)
class Factor:
    """The upper triangular U with U^T U = (damped gram)^-1.

    ``reversed_factor``: float64 [K, K], U with its rows and its columns in reverse; ``damping``: what it took.
    """

    reversed_factor: Tensor
    damping: float

    @property
    def diagonal(self) -> Tensor:
        """That of U, [K]."""
        return self.reversed_factor.diagonal().flip(0)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of U, [stop - start, K]."""
        k = len(self.reversed_factor)
        return self.reversed_factor[k - stop : k - start].flip(0, 1)

    def divide(self, rows: Tensor) -> Tensor:
        """``rows`` [N, K] times the inverse, U^T U, in float64."""
        reversed_factor = rows.to(self.reversed_factor.dtype).flip(1)
        return ((reversed_factor @ self.reversed_factor.mT) @ self.reversed_factor).flip(1)


def inverse_factor(gram: Tensor, damping: float, order: Tensor | None = None) -> Factor:
    """The factor of the inverse of ``gram`` [K, K] (float32 or float64), damped; ``order`` [K]: which of its channels is first,
    second and so on in it.

    Where the matrix is not positive definite in float64, ten times the damping is tried, at least 1e-6. One Cholesky factor
    with the axes turned round and one triangular inverse, both in the place of one matrix: the inverse of the whole is never
    made, which would square the condition number. Raises ``ValueError`` where no damping helps: such a matrix is no mean of
    x x^T.
    """
    if not bool(torch.isfinite(gram.sum(dtype=torch.float64))):
        raise ValueError("the Gram matrix holds NaN or infinity: collect the statistics again")
    asked = damping
    reversed_factor = (torch.arange(len(gram), device=gram.device) if order is None else order).flip(0)
    while damping <= 1e3:
        # Symmetric, so that this is the same matrix in the strides that LAPACK wants.
        lower = _damped(gram, reversed_factor, damping).mT
        failed = torch.empty((), dtype=torch.int32, device=gram.device)
        torch.linalg.cholesky_ex(lower, out=(lower, failed))
        diagonal = lower.diagonal()
        # Pivots this small are what rounding left of zeros.
        if not int(failed) and bool(diagonal.min() > 1e-7 * diagonal.max()):
            _invert(lower)
            return Factor(lower, damping)
        del lower, diagonal  # before the next one is made
        damping = max(10 * damping, 1e-6)
    raise ValueError(f"the Gram matrix is not positive definite, with any damping from {asked:g} to 1000: collect it again")


def _damped(gram: Tensor, order: Tensor, damping: float) -> Tensor:
    """:func:`damped` of ``gram`` in ``order``, in float64 and without a second matrix of its size."""
    mean = gram.diagonal().mean(dtype=torch.float64)
    if not bool(mean > 0):
        return torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    out = torch.empty(gram.shape, dtype=torch.float64, device=gram.device)
    for rows, part in zip(order.split(_ROWS), out.split(_ROWS), strict=True):
        part.copy_(gram[rows][:, order])
    out.div_(mean).diagonal().add_(damping)
    return out


def _invert(lower: Tensor) -> None:
    """A lower triangular matrix, in place: halves first, then what stands between them."""
    if len(lower) <= _ROWS:
        one = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, one, upper=False))
        return
    half = len(lower) // 2
    first, between, last = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    _invert(first)
    _invert(last)
    for rows in between.split(_ROWS):
        rows.copy_(rows @ first)
    for columns in between.split(_ROWS, 1):
        columns.copy_(last @ columns).neg_()


def drift_target(weight: Tensor, statistics: Statistics, damping: float) -> Tensor:
    """The weight [N, K] that on the inputs x comes nearest to what ``weight`` gives on those of the float model, f.

    W + W D (G + d)^-1 for the Gram matrix G, the drift D, the mean of (f - x) x^T, and d = ``damping`` of the mean of the
    diagonal of G: where tr(E G E^T) is least for E = W' - that, the mean of \\|W f - W' x\\|^2 + d \\|W - W'\\|^2 is. It is
    ``weight`` itself where there is no drift.

    Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", 2025, on matrices alone.
    """
    drift, gram = statistics.drift, statistics.gram.to(weight.device)
    mean = gram.diagonal().mean(dtype=torch.float64)
    if drift is None or not bool(mean > 0):
        return weight
    factor = inverse_factor(gram, damping)
    out = torch.empty_like(weight)
    for found, rows in zip(out.split(_ROWS), weight.split(_ROWS), strict=True):
        missing = (rows @ drift.to(rows.device, rows.dtype)).double() / mean
        found.copy_(rows + factor.divide(missing))
    return out


def notes_on(statistics: Statistics, asked: float, used: float) -> tuple[str, ...]:
    """What a person should know of a layer's statistics and of the damping that they took."""
    notes = []
    dead = int(statistics.dead.sum())
    if dead:
        notes.append(f"{dead} of {len(statistics.absmax)} input channels were 0 in every row: damping alone holds their weights")
    if used > asked:
        notes.append(f"damping {used:g} instead of {asked:g}: the inputs are too alike for less")
    return tuple(notes)
