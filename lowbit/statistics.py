"""Statistics: what calibration keeps of a layer's inputs, in memory that does not grow with the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .torch_state import isolated

__all__ = ["Statistics", "Tally", "relative"]

_CHUNK = 256  # rows of a matrix that are worked on at a time, so that no second one of its size is made
_ROWS = 4096  # rows that are multiplied at a time: their sum is float32's only one, everything above is float64


@dataclass(frozen=True, eq=False)
class Statistics:
    """The second moments of a layer's inputs x [K].

    Attributes:
        gram: float32 [K, K], the mean of x x^T over the rows seen.
        absmax: float32 [K], the largest \\|x\\| of each channel.
        count: rows seen, at least 1.
        drift: float32 [K, K], the mean of (f - x) x^T, where f is what the float model gives in the place of x; None where
            nobody asked, as if there were no difference.
    """

    gram: Tensor
    absmax: Tensor
    count: int
    drift: Tensor | None = None

    def __post_init__(self) -> None:
        k = self.absmax.shape[-1] if self.absmax.dim() == 1 else -1
        if tuple(self.gram.shape) != (k, k):
            shapes = f"{list(self.gram.shape)} and {list(self.absmax.shape)}"
            raise ValueError(f"gram must be [K, K] and absmax [K], got {shapes}")
        if self.drift is not None and self.drift.shape != self.gram.shape:
            raise ValueError(f"drift must be [K, K] as gram is, got {list(self.drift.shape)} for {list(self.gram.shape)}")
        if self.count < 1:
            raise ValueError(f"statistics need at least 1 row, got {self.count}")

    @staticmethod
    @isolated()
    def of(x: Tensor, name: str = "input", float_x: Tensor | None = None) -> Statistics:
        """The statistics of the rows of ``x`` [..., K], and of how far they are from those ``float_x``; see :meth:`Tally.add`."""
        tally = Tally(x.shape[-1], x.device, drifts=float_x is not None)
        tally.add(x, name, float_x=float_x)
        return tally.statistics()

    @property
    def dead(self) -> Tensor:
        """bool [K]: channels that were 0 in every row, so that their weights are free."""
        return self.gram.diagonal() == 0

    @isolated()
    def scaled(self, s: Tensor) -> Statistics:
        """The statistics of x / s, for ``s`` [K] (finite, not 0): what a layer reads after its weight is multiplied by s."""
        if s.shape != self.absmax.shape or not bool((torch.isfinite(s) & (s != 0)).all()):
            raise ValueError(f"s must be {self.absmax.numel()} finite numbers other than 0, got {list(s.shape)}")
        wide = s.to(self.gram.device, torch.float64)

        def divided(matrix: Tensor) -> Tensor:
            out = torch.empty_like(matrix)
            for start in range(0, len(out), _CHUNK):
                rows = slice(start, start + _CHUNK)
                out[rows] = matrix[rows].double().div_(wide).div_(wide[rows, None])
            return out

        drift = None if self.drift is None else divided(self.drift)
        return Statistics(divided(self.gram), (self.absmax.double() / wide.abs()).float(), self.count, drift)

    def merged(self, other: Statistics) -> Statistics:
        """The statistics of both sets of rows."""
        both = Tally.from_statistics(self)
        both.merge(Tally.from_statistics(other))
        return both.statistics()

    def to(self, device: torch.device | str) -> Statistics:
        """The same on ``device``."""
        drift = None if self.drift is None else self.drift.to(device)
        return Statistics(self.gram.to(device), self.absmax.to(device), self.count, drift)

    def output_error(self, weight: Tensor, rounded: Tensor) -> float:
        """How far x @ rounded.T is from x @ weight.T, squared and relative, for weights [N, K]: tr(E G E^T) / tr(W G W^T).

        0 where the weight gives 0 for all these inputs and so does ``rounded``; infinity where only the weight does.
        """
        return relative(*self.output_energies(weight, rounded))

    @isolated()
    def output_energies(self, weight: Tensor, rounded: Tensor) -> tuple[float, float]:
        """tr(E G E^T) and tr(W G W^T), for weights [N, K] and E = rounded - weight: the mean squares of the error of
        x @ rounded.T and of x @ weight.T, summed over N."""
        noise = signal = 0.0
        for rows in torch.arange(len(weight), device=weight.device).split(_CHUNK):
            w = weight[rows].double()
            e = w - rounded[rows].double()
            noise, signal = noise + _squared(e, self.gram), signal + _squared(w, self.gram)
        return max(noise, 0.0), signal


def relative(noise: float, signal: float) -> float:
    """``noise`` / ``signal``; 0 where both are, infinity where only ``signal`` is."""
    return noise / signal if signal > 0 else (0.0 if noise <= 0 else float("inf"))


def _squared(w: Tensor, gram: Tensor) -> float:
    """tr(w gram w^T), products in float32 and their sum in float64."""
    return float(((w.float() @ gram).double() * w).sum())


class Tally:
    """Sums up :class:`Statistics`, in float64 and in the order in which rows are added.

    Keeps 8 bytes K^2 whatever the number of rows, and with ``drifts`` 16. Products are taken in float32 over at most 4,096
    rows at a time.

    Attributes:
        gram: float64 [K, K], the sum of x x^T, of whose two equal halves the upper one is kept in squares on the diagonal alone.
        absmax: float32 [K].
        count: rows added.
        drift: float64 [K, K], the sum of (f - x) x^T (:attr:`Statistics.drift`); None without ``drifts``.
    """

    def __init__(self, k: int, device: torch.device | str = "cpu", drifts: bool = False) -> None:
        self.gram = torch.zeros(k, k, dtype=torch.float64, device=device)
        self.drift = torch.zeros_like(self.gram) if drifts else None
        self.absmax = torch.zeros(k, dtype=torch.float32, device=device)
        self.count = 0

    @staticmethod
    def from_statistics(statistics: Statistics) -> Tally:
        """The tally of the rows that ``statistics`` were taken from."""
        tally = Tally(0)
        tally.gram = statistics.gram.double() * statistics.count
        tally.drift = None if statistics.drift is None else statistics.drift.double() * statistics.count
        tally.absmax, tally.count = statistics.absmax.clone(), statistics.count
        return tally

    @property
    def matrices(self) -> list[Tensor]:
        """The matrices that it keeps."""
        return [self.gram] if self.drift is None else [self.gram, self.drift]

    @isolated()
    def add(self, x: Tensor, name: str = "input", batch: int | None = None, float_x: Tensor | None = None) -> None:
        """Add the rows of ``x`` [..., K] (any floating dtype); ``float_x``, of the same shape, is what the float model gives in
        their place, which only a tally that ``drifts`` looks at, and ``x`` itself by default.

        Raises ``ValueError`` with ``name`` and ``batch`` where a row holds NaN or infinity, or numbers whose squares
        float32 cannot hold.
        """
        if float_x is not None and float_x.shape != x.shape:
            raise ValueError(f"{name}: float_x is {list(float_x.shape)}, and what comes is {list(x.shape)}")
        rows = _rows(x)
        if rows.shape[1] != len(self.absmax):
            raise ValueError(f"{name}: rows of {len(self.absmax)} numbers were expected, got {rows.shape[1]}")
        if not len(rows):
            return
        rows = rows.to(self.gram.device)
        if rows.dtype != torch.float64:
            rows = rows.float()
        absmax = rows.abs().amax(0)
        where = name if batch is None else f"{name}, batch {batch}"
        if not bool(torch.isfinite(absmax).all()):
            bad = int((~torch.isfinite(rows)).any(-1).sum())
            raise ValueError(
                f"{where}: {bad} of {len(rows)} rows hold NaN or infinity: look at the model on this text, or leave it out"
            )
        top = float(absmax.max()) if len(absmax) else 0.0
        if top > 1e18:
            raise ValueError(f"{where}: an input of {top:.3g} is too large for its square to fit float32: scale the model down")
        _add_products(self.gram, rows, rows, symmetric=True)
        if self.drift is not None and float_x is not None:
            apart = _rows(float_x).to(rows.device, rows.dtype) - rows
            if not bool(torch.isfinite(apart).all()):
                raise ValueError(f"{where}: the float model gives NaN or infinity: leave this text out")
            _add_products(self.drift, apart, rows)
        self.absmax = torch.maximum(self.absmax, absmax.float())
        self.count += len(rows)

    @isolated()
    def merge(self, other: Tally) -> None:
        """Add the rows of ``other``. Sums are float64, so their order shows in the last bits alone."""
        if other.absmax.shape != self.absmax.shape:
            raise ValueError(f"only rows of the same length can be merged, got {len(self.absmax)} and {len(other.absmax)}")
        self.gram = self.gram + other.gram.to(self.gram.device)
        if other.drift is not None:
            other_drift = other.drift.to(self.gram.device)
            self.drift = other_drift.clone() if self.drift is None else self.drift + other_drift
        self.absmax = torch.maximum(self.absmax, other.absmax.to(self.absmax.device))
        self.count += other.count

    @isolated()
    def statistics(self) -> Statistics:
        """The statistics of all rows added. Raises ``ValueError`` where there are none."""
        count = max(self.count, 1)
        gram = torch.empty(self.gram.shape, device=self.gram.device)
        drift = None if self.drift is None else torch.empty_like(gram)
        for start in range(0, len(gram), _CHUNK):
            rows = slice(start, start + _CHUNK)
            square = self.gram[rows, rows]
            gram[rows, rows] = (square + square.T) / (2 * count)
            gram[rows, :start] = self.gram[rows, :start] / count
            gram[:start, rows] = gram[rows, :start].T
            if drift is not None and self.drift is not None:
                drift[rows] = self.drift[rows] / count
        return Statistics(gram, self.absmax.clone(), self.count, drift)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _add_products(total: Tensor, a: Tensor, b: Tensor, symmetric: bool = False) -> None:
    """Add a^T b to ``total`` [K, K], for ``a`` and ``b`` [rows, K]; of a ``symmetric`` sum what lies below the diagonal's squares
    alone, and these."""
    for left, right in zip(a.split(_ROWS), b.split(_ROWS), strict=True):
        for start in range(0, left.shape[1], _CHUNK):
            stop = start + _CHUNK
            total[start:stop, : stop if symmetric else None] += left[:, start:stop].T @ right[:, : stop if symmetric else None]
