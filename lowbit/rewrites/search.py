"""Choosing what the shared input of some layers is divided by: candidates, and what the layers' outputs lose under each.

The loss of a layer is tr((W - Q) G (W - Q)^T) for the Gram matrix G of its inputs, where W diag(s) was rounded to Q diag(s)
under the layer's own scheme: no activation is kept or run again. Where the layer rounds its input too, what that costs is
added (:mod:`~lowbit.rewrites.noise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms.rows import slices
from ..grid import to_codes, to_values
from ..layer_config import LayerConfig
from ..scales import choose, outer_scale
from ..statistics import Statistics
from .noise import input_noise

__all__ = ["Choice", "Pool", "Reader", "choose_divisor", "centred_scale", "losses_of"]

_ROWS = 256  # of a weight that are rounded at a time at least, since each slice is multiplied by the Gram matrix
_LIMIT = 1e4  # beyond which nothing is divided or multiplied, once the middle is 1


@dataclass(frozen=True)
class Reader:
    """A layer whose input is to be divided.

    Attributes:
        weight: [N, K], float32 or float64.
        config: what becomes of it.
        statistics: of its input, before.
        channels: int64 [K], the one of the pool's channels that each channel of the input is divided with; -1 for none.
    """

    weight: Tensor
    config: LayerConfig
    statistics: Statistics
    channels: Tensor

    def spread(self, divisor: Tensor) -> Tensor:
        """``divisor`` [C] of the pool's channels as that of the input's, [K]."""
        known = divisor.to(self.weight.device, self.weight.dtype)
        return torch.where(self.channels >= 0, known[self.channels.clamp(min=0)], 1.0)

    def gathered(self, values: Tensor, reduce: str, count: int) -> Tensor:
        """``values`` [K] of the input's channels as one for each of the pool's, [count] float64: their ``"amax"`` or ``"sum"``;
        0 for those that it does not read."""
        inside = self.channels >= 0
        out = torch.zeros(count, dtype=torch.float64, device=values.device)
        return out.scatter_reduce(0, self.channels[inside], values[inside].double(), reduce)


@dataclass(frozen=True)
class Pool:
    """Layers whose inputs are divided together: all that a source reaches.

    Attributes:
        count: channels of the source.
        readers: called for each pass over them, since not all weights and statistics need fit into memory together.
    """

    count: int
    readers: Callable[[], Iterator[Reader]]

    def largest(self, values: Callable[[Reader], Tensor]) -> Tensor:
        """Of the ``values`` (at least 0) of each reader's input [K] the largest for each channel of the source, [count] float64
        on the CPU."""
        return torch.stack([r.gathered(values(r), "amax", self.count).cpu() for r in self.readers()]).amax(0)

    def mean(self, values: Callable[[Reader], Tensor]) -> Tensor:
        """Their mean."""
        total = number = torch.zeros(self.count, dtype=torch.float64)
        for reader in self.readers():
            found = values(reader)
            total = total + reader.gathered(found, "sum", self.count).cpu()
            number = number + reader.gathered(torch.ones_like(found), "sum", self.count).cpu()
        return total / number.clamp(min=1)


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        divisor: [C] float64, positive.
        label: how it came about: ``"alpha 0.55"``; empty where nothing is better than leaving all as it is.
        before, after: the loss relative to the size of the outputs (see :attr:`lowbit.plans.LayerPlan.loss`).
    """

    divisor: Tensor
    label: str
    before: float
    after: float


def centred_scale(size: Tensor) -> Tensor:
    """``size`` [C] (at least 0) over the middle of its logarithms, so that the smallest and the largest are as far from 1; 1
    where it is 0, as on channels that are never heard."""
    used = (size > 0) & torch.isfinite(size)
    if not bool(used.any()):
        return torch.ones_like(size)
    inside = size[used]
    level = size / (inside.amax().sqrt() * inside.amin().sqrt())
    return torch.where(used, level.clamp(1 / _LIMIT, _LIMIT), 1.0)


def losses_of(pool: Pool, divisors: Sequence[Tensor], ranges: str = "range") -> Tensor:
    """What the readers' outputs lose under each of ``divisors`` [C], float64 [len(divisors)].

    The mean of what each loses relative to the size of its own outputs, weighted by the rows that it saw. Large outputs are not
    worth more than small ones: of queries, keys and values the last are the smallest, and matter no less.

    ``ranges``: how the scales of weights are chosen, ``method`` of :func:`lowbit.scales.choose`.
    """
    total, seen = torch.zeros(len(divisors), dtype=torch.float64), 0
    for reader in pool.readers():
        weight, gram = reader.weight, reader.statistics.gram.to(reader.weight.dtype)
        size = sum(float((rows @ gram).mul_(rows).sum()) for rows in slices(weight, _ROWS))
        seen += reader.statistics.count
        if size > 0:
            losses = torch.stack([loss_under(reader, reader.spread(divisor), ranges) for divisor in divisors])
            total += reader.statistics.count / size * losses.cpu()
    return total / max(seen, 1)


def choose_divisor(divisors: Sequence[Tensor], labels: Sequence[str], losses: Tensor, place: int | None = None) -> Choice:
    """The choice of the one at ``place``, by default the first of those that lose least; at place 0 all is left as it is."""
    best = int(losses.argmin()) if place is None else place
    return Choice(divisors[best], labels[best], float(losses[0]), float(losses[best]))


def loss_under(reader: Reader, s: Tensor, ranges: str) -> Tensor:
    """What the reader's output loses where its input is divided by ``s`` [K] and its weight is multiplied by it, float64 []."""
    scheme, weight, gram = reader.config.weight, reader.weight, reader.statistics.gram.to(reader.weight.dtype)
    outer = outer_scale((weight * s).abs().amax(), scheme) if scheme.outer else None
    activation, total = reader.config.activation, torch.zeros((), dtype=torch.float64, device=weight.device)
    noise = None
    if activation is not None:
        moments = reader.statistics.gram.diagonal() / s.square(), reader.statistics.absmax / s
        noise = input_noise(moments, activation, reader.config.activation_scale)
    try:
        for rows in slices(weight, _ROWS):
            scaled = rows * s
            scales = choose(scaled, scheme, ranges, outer)
            values = to_values(to_codes(scaled, scheme, scales), scheme, scales, scaled.dtype)
            error = (values - scaled).div_(s)
            total += (error @ gram).mul_(error).sum(dtype=torch.float64)
            if noise is not None:
                total += (values.double().square() @ noise).sum()
    except ValueError:  # a scale that its own format cannot hold
        return torch.full_like(total, torch.inf)
    return total
