"""How far a quantized model's predictions are from those of the float model, token by token on the same text.

KL divergence and agreement compare whole distributions, so that a few thousand tokens tell what accuracy needs many
thousands of questions for.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor, nn

__all__ = ["Divergence", "Reference", "divergence", "student_quantile"]

_LOGITS = 1 << 24  # logits of a batch at a time, as for perplexity
_DOUBLES = 1 << 22  # logits that are made float64 at a time: 32 MiB for each of the two models
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Divergence:
    """How a model's predictions differ from the float model's, over ``tokens`` predicted tokens.

    Attributes:
        kl: the mean of KL(float || model) in nats a predicted token, at least 0, between ``kl_low`` and ``kl_high``.
        agreement: the share of tokens, 0..1, for which both models hold the same next token the likeliest.
    """

    kl: float
    kl_low: float
    kl_high: float
    agreement: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; None for what is not finite, since JSON has no infinity."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


class Reference:
    """What the float model predicts on some chunks of text, kept for any number of models to be compared with.

    An exact divergence needs every logit. They are kept in a file without a name, in the dtype in which the model gave them
    and therefore without loss, and read back a batch at a time: one float model in memory fewer while each quantized one
    runs, and one run of it in all instead of one a recipe. The file goes with :meth:`close`, with the object or with the
    process, and takes :attr:`nbytes`: 2 or 4 bytes for each token of the vocabulary and each predicted token
    (8,192 tokens, 30 chunks of 512, float32: 502 MB).
    """

    def __init__(self, chunks: Tensor, file: IO[bytes], shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.chunks = chunks
        self._file, self._shape, self._dtype = file, shape, dtype

    @staticmethod
    def collect(
        model: nn.Module,
        chunks: Tensor,
        *,
        limit: int | None = None,
        folder: str | Path | None = None,
        progress: Progress | None = None,
    ) -> Reference:
        """Run the float ``model`` over ``chunks``.

        Args:
            model: maps ids [batch, length] to an output with ``.logits`` [batch, length, vocabulary].
            chunks: ids [chunks, length], at least 2 of at least 2 tokens, that do not overlap: :func:`windows_of` of
                :mod:`lowbit.evals.perplexity` gives them.
            limit: chunks at most, taken evenly from all of them. Neighbours are alike, being of one article: the interval of
                30 in a row of WikiText covers the mean over that text 78 times in a hundred, of 30 drawn from all of it 94.
            folder: where the logits are kept; that of temporary files if None.
            progress: called with (chunks done, chunks in all) after each batch.

        Raises ``ValueError`` for too few chunks, for a folder that has too little room and for logits that hold NaN.
        """
        if chunks.dim() != 2 or chunks.shape[0] < 2 or chunks.shape[1] < 2:
            raise ValueError(f"chunks must be ids [chunks, length], at least 2 of 2 tokens, got {tuple(chunks.shape)}")
        if limit is not None:
            if limit < 2:
                raise ValueError(f"limit must be at least 2 chunks, got {limit}")
            chunks = chunks[torch.linspace(0, len(chunks) - 1, min(limit, len(chunks)), dtype=torch.float64).round().long()]
        where = Path(tempfile.gettempdir() if folder is None else folder)
        made: Reference | None = None
        file = tempfile.TemporaryFile(dir=where)  # noqa: SIM115 - it is the reference that closes it
        try:
            for start, logits in _batches(model, chunks, None):
                if made is None:
                    made = Reference(chunks, file, (chunks.shape[1] - 1, logits.shape[-1]), logits.dtype)
                    made._check_disk_space(where)
                if bool(torch.isnan(logits).any()):
                    raise ValueError(f"the float model's logits hold NaN in chunks {start + 1} to {start + len(logits)}")
                file.write(logits.cpu().contiguous().view(torch.uint8).reshape(-1).numpy().data)
                if progress is not None:
                    progress(start + len(logits), len(chunks))
            file.flush()
        except BaseException:
            file.close()
            raise
        assert made is not None
        return made

    @property
    def vocabulary(self) -> int:
        """Logits of a token."""
        return self._shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.chunks) * math.prod(self._shape) * self._dtype.itemsize

    def logits(self, start: int, stop: int) -> Tensor:
        """The float model's logits for chunks ``start`` to ``stop`` [chunks, length - 1, vocabulary], on the CPU."""
        count = math.prod(self._shape)
        held = bytearray((stop - start) * count * self._dtype.itemsize)
        self._file.seek(start * count * self._dtype.itemsize)
        view, read = memoryview(held), 0
        while read < len(held):
            got = self._file.readinto(view[read:])  # type: ignore[attr-defined]
            if not got:
                raise OSError(f"the float model's logits end after {start * count * self._dtype.itemsize + read} bytes")
            read += got
        return torch.frombuffer(held, dtype=self._dtype).view(stop - start, *self._shape)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_disk_space(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        if free < self.nbytes:
            raise ValueError(
                f"the float model's logits take {self.nbytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB left: "
                "take fewer chunks, or another folder"
            )


def divergence(model: nn.Module, reference: Reference, *, progress: Progress | None = None) -> Divergence:
    """KL divergence of ``model`` from the float model and how often both agree, on the chunks of ``reference``.

    Both are computed in float64 from the logits of either model. The interval is that of Student's t for the mean over
    chunks at 95 %, each chunk one observation: tokens of a chunk share their context and are no independent ones. It
    speaks of the text that the chunks were taken from evenly. The divergence cannot be negative, so neither is the lower
    end.

    Raises ``ValueError`` for a model of another vocabulary. Logits that hold NaN make every figure of the divergence NaN.
    """
    means: list[Tensor] = []  # on the device until the end, so that no chunk waits for the one before
    same: list[Tensor] = []
    for start, logits in _batches(model, reference.chunks, reference.vocabulary):
        reference_logits = reference.logits(start, start + len(logits))
        for quantized_logits, float_logits in zip(logits, reference_logits, strict=True):
            total, agreed = _compared(float_logits, quantized_logits)
            means.append(total / len(quantized_logits))
            same.append(agreed)
        if progress is not None:
            progress(start + len(logits), len(reference.chunks))
    kl: list[float] = torch.stack(means).tolist()
    tokens = len(kl) * (reference.chunks.shape[1] - 1)
    low, high = _interval(kl)
    return Divergence(fmean(kl), low, high, int(torch.stack(same).sum()) / tokens, tokens)


def student_quantile(p: float, degrees: int) -> float:
    """The ``p`` quantile, 0.5 to 1, of Student's t distribution with ``degrees`` of freedom.

    By halving, on the finite sum for whole degrees: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3-4.
    """
    if not 0.5 <= p < 1 or degrees < 1:
        raise ValueError(f"p must be 0.5 to 1 and degrees at least 1, got {p} and {degrees}")
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(80):
        middle = (low + high) / 2
        if _central(middle, degrees) < 2 * p - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _batches(model: nn.Module, chunks: Tensor, vocabulary: int | None) -> Iterator[tuple[int, Tensor]]:
    """(the first chunk, logits [batch, length - 1, vocabulary]) a batch at a time; batches are the same for every model,
    because sums over another number of rows would round differently."""
    width = vocabulary or int(getattr(getattr(model, "config", None), "vocab_size", 0)) or int(chunks.max()) + 1
    rows, device = max(1, _LOGITS // (chunks.shape[1] * width)), next(model.parameters()).device
    for start in range(0, len(chunks), rows):
        with torch.inference_mode():  # not around the yield, which would leave it on for the caller
            logits = model(chunks[start : start + rows].to(device)).logits[:, :-1]
        if vocabulary is not None and logits.shape[-1] != vocabulary:
            raise ValueError(f"the model gives {logits.shape[-1]} logits a token and the float model {vocabulary}: not the same")
        yield start, logits


@torch.inference_mode()
def _compared(float_logits: Tensor, quantized_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of KL(theirs || ours) over tokens, float64 [], and for how many both have the same largest logit, int64 []:
    [tokens, vocabulary]."""
    total = torch.zeros((), dtype=torch.float64, device=quantized_logits.device)
    agreed = torch.zeros((), dtype=torch.int64, device=quantized_logits.device)
    rows = max(1, _DOUBLES // quantized_logits.shape[-1])
    for start in range(0, len(quantized_logits), rows):
        y = quantized_logits[start : start + rows]
        x = float_logits[start : start + rows].to(y.device)
        agreed += (x.argmax(-1) == y.argmax(-1)).sum()
        p, q = x.double().log_softmax(-1), y.double().log_softmax(-1)
        chance = p.exp()
        # What the float model rules out adds nothing, also where both logits are -infinity.
        total += torch.where(chance > 0, chance * (p - q), 0).sum(-1).clamp_min(0).sum()
    return total, agreed


def _interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t for the mean of at least two values that cannot be negative."""
    mean = fmean(values)
    if not math.isfinite(mean):
        return mean, mean
    half = student_quantile(0.5 + confidence / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return max(0.0, mean - half), mean + half


def _central(angle: float, degrees: int) -> float:
    """The chance that |t| is below sqrt(degrees) tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = total = 0.0
    if degrees > 1:
        term = total = cosine if odd else 1.0
        for i in range(2 + odd, degrees, 2):
            term *= cosine * cosine * (i - 1) / i
            total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
