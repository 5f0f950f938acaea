"""The Gram matrix as the methods use it: damped, factorised, and what there is to say of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..statistics import Statistics

__all__ = ["damped", "inverse_factor", "notes_on"]


def damped(gram: Tensor, damping: float) -> Tensor:
    """``gram`` [K, K] over the mean of its diagonal, with ``damping`` added to that; the identity where it is all zeros."""
    mean = gram.diagonal().mean()
    one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return gram / mean + damping * one if bool(mean > 0) else one


def inverse_factor(gram: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper triangular U with U^T U = (damped gram)^-1, for ``gram`` [K, K] float64, and the damping that it took.

    Where the matrix is not positive definite for the precision at hand, ten times the damping is tried, at least 1e-6.
    One Cholesky factor with the axes turned round and one triangular inverse: the inverse itself is never made, which
    would square the condition number. Raises ``ValueError`` where no damping helps: such a matrix is no mean of x x^T.
    """
    if not bool(torch.isfinite(gram).all()):
        raise ValueError("the Gram matrix holds NaN or infinity: collect the statistics again")
    asked = damping
    while damping <= 1e3:
        lower, failed = torch.linalg.cholesky_ex(damped(gram, damping).flip(0, 1))
        diagonal = lower.diagonal()
        # Pivots this small are what rounding left of zeros.
        if not int(failed) and bool(diagonal.min() > 1e-7 * diagonal.max()):
            one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            return torch.linalg.solve_triangular(lower.flip(0, 1), one, upper=True), damping
        damping = max(10 * damping, 1e-6)
    raise ValueError(f"the Gram matrix is not positive definite, with any damping from {asked:g} to 1000: collect it again")


def notes_on(statistics: Statistics, asked: float, used: float) -> tuple[str, ...]:
    """What a person should know of a layer's statistics and of the damping that they took."""
    notes = []
    dead = int(statistics.dead.sum())
    if dead:
        notes.append(f"{dead} of {len(statistics.absmax)} input channels were 0 in every row: damping alone holds their weights")
    if used > asked:
        notes.append(f"damping {used:g} instead of {asked:g}: the inputs are too alike for less")
    return tuple(notes)
