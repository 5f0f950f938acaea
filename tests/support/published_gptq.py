"""GPTQ as its paper writes it (Frantar et al. 2022, section 3): the whole inverse, one weight column at a time, no blocks and
no Cholesky factor, in float64. It is slow, and what the fast one is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.grid import Scales, scale_values
from lowbit.scheme import Scheme


def published_gptq(weight: Tensor, scheme: Scheme, gram: Tensor, scales: Scales, damping: float, order: list[int]) -> Tensor:
    """Codes [N, K] of ``weight`` under ``scales`` that are held, columns rounded in ``order``."""
    k = weight.shape[1]
    numbers = torch.tensor(scheme.fmt.numbers, dtype=torch.float64)
    scale = scale_values(scheme, scales, torch.float64).repeat_interleave(scheme.group(k), 1)[:, :k]
    zero = torch.zeros_like(scale)
    if scales.zero_point is not None:
        zero = scales.zero_point.double().repeat_interleave(scheme.group(k), 1)[:, :k]
    w, left = weight.double().clone(), list(range(k))
    inverse = torch.linalg.inv(gram.double() + damping * gram.double().diagonal().mean() * torch.eye(k, dtype=torch.float64))
    codes = torch.empty(w.shape, dtype=torch.uint8)
    for column in order:
        codes[:, column] = scheme.fmt.nearest(w[:, column] / scale[:, column] + zero[:, column])
        distance = ((numbers - zero[:, column, None]) * scale[:, column, None] - w[:, column, None]).abs()
        value = (numbers[distance.argmin(1)] - zero[:, column]) * scale[:, column]
        place = left.index(column)
        error = (w[:, column] - value) / inverse[place, place]
        w[:, left] -= error[:, None] * inverse[place]  # equation 2: the best change of the weights that are left
        # Equation 3: the inverse without the column, by one step of Gaussian elimination.
        inverse = inverse - inverse[:, place, None] * inverse[place] / inverse[place, place]
        keep = [i for i in range(len(left)) if i != place]
        inverse, left = inverse[keep][:, keep], [left[i] for i in keep]
    return codes
