"""The Gram matrix as the methods use it: damped, factorised, and what there is to say of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..statistics import Statistics

__all__ = ["Factor", "drift_target", "damped", "factored", "notes_on"]

_ROWS = 256  # of a matrix that are copied at a time
_SOLVED = 1024  # of a weight that go through the triangles at a time


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
    """The upper triangular R with R^T R = the damped Gram matrix, of which the column that is rounded first is the last.

    For errors e of the columns the loss is |R e|^2: its part j is R[j, j] e[j] and what the columns rounded before j add to it.
    GPTQ's U, the factor of the inverse, has 1 / R[j, j] on its diagonal, and both round every column to the same
    (Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm", 2025); R needs no inverse.

    ``lower``: float64 [K, K], R^T, with the column that is rounded first in the last row; ``order`` [K]: which column is first,
    second and so on; ``damping``: what it took.
    """

    lower: Tensor
    order: Tensor
    damping: float

    @property
    def diagonal(self) -> Tensor:
        """R[j, j] for each column in the order of rounding, [K]."""
        return self.lower.diagonal().flip(0)

    def shares(self, start: int, stop: int) -> Tensor:
        """Of the errors of columns 0 to ``stop`` in the order, what each of those from ``start`` to ``stop`` is moved by,
        [stop, stop - start], zero for a column itself and those behind it."""
        k = len(self.lower)
        part = self.lower[k - stop :, k - stop : k - start]
        return (part / part.diagonal()).tril(-1).flip(0, 1)

    def divide(self, rows: Tensor) -> Tensor:
        """``rows`` [N, K] times the inverse of the damped Gram matrix, in float64."""
        order = self.order.flip(0)
        solved = rows.to(self.lower.dtype)[:, order].T
        solved = torch.linalg.solve_triangular(self.lower, solved, upper=False)
        solved = torch.linalg.solve_triangular(self.lower.mT, solved, upper=True)
        return torch.empty_like(solved).index_copy_(0, order, solved).T


def factored(gram: Tensor, damping: float, order: Tensor | None = None) -> Factor:
    """The factor of ``gram`` [K, K] (float32 or float64), damped; ``order`` [K]: which of its channels is rounded first, second
    and so on.

    Where the matrix is not positive definite in float64, ten times the damping is tried, at least 1e-6. Raises ``ValueError``
    where no damping helps: such a matrix is no mean of x x^T.
    """
    if not bool(torch.isfinite(gram.sum(dtype=torch.float64))):
        raise ValueError("the Gram matrix holds NaN or infinity: collect the statistics again")
    asked = damping
    order = torch.arange(len(gram), device=gram.device) if order is None else order
    while damping <= 1e3:
        # Symmetric, so that this is the same matrix in the strides that LAPACK wants.
        lower = _damped(gram, order.flip(0), damping).mT
        failed = torch.empty((), dtype=torch.int32, device=gram.device)
        torch.linalg.cholesky_ex(lower, out=(lower, failed))
        diagonal = lower.diagonal()
        # Pivots this small are what rounding left of zeros.
        if not int(failed) and bool(diagonal.min() > 1e-7 * diagonal.max()):
            return Factor(lower, order, damping)
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


def drift_target(weight: Tensor, statistics: Statistics, factor: Factor) -> Tensor:
    """The weight [N, K] that on the inputs x comes nearest to what ``weight`` gives on those of the float model, f.

    W + W D (G + d)^-1 for the Gram matrix G, the drift D, the mean of (f - x) x^T, and d, the damping of ``factor``, of the
    mean of the diagonal of G: where tr(E G E^T) is least for E = W' - that, the mean of \\|W f - W' x\\|^2 + d \\|W - W'\\|^2
    is. It is ``weight`` itself where there is no drift.

    Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", 2025, on matrices alone.
    """
    drift, gram = statistics.drift, statistics.gram.to(weight.device)
    mean = gram.diagonal().mean(dtype=torch.float64)
    if drift is None or not bool(mean > 0):
        return weight
    out = torch.empty_like(weight)
    for found, rows in zip(out.split(_SOLVED), weight.split(_SOLVED), strict=True):
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
