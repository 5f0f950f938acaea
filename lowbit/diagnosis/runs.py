"""Both models run on the same data: each layer's own error, what it comes to in the model, and where numbers overflow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from ..calibration.blocks import call
from ..calibration.data import Batch
from ..calibration.padding import Padding
from ..calibration.pytree import tree_leaves
from ..linear import QLinear
from ..mixed_precision.logits import logits_of, token_logits
from ..quantized_module import QuantizedModule
from ..tensor import QTensor
from .sqnr import SignalToNoise

__all__ = ["Overflow", "Pair", "Runs"]

_ROWS = 256  # of each layer's inputs in a batch, evenly: enough for decibels


class Pair:
    """A layer of the float model and the quantized one in its place, and what runs show of the two.

    ``isolated``: its error on the float model's inputs; ``expected``: that of ``rtn``, the float weight rounded to nearest (None
    where the two models' weights are not to be compared, and then both stay empty);
    ``in_model``: its error in the quantized model; ``arithmetic``: that of its kernel, against the numbers that its weight stands
    for; ``repaired``: its error with the weight of this name [N, K], where one was given.
    """

    def __init__(
        self, name: str, original: nn.Module, quantized: QuantizedModule, rtn: QTensor | None, weight: Tensor | None
    ) -> None:
        self.name, self.original, self.quantized, self.rtn = name, original, quantized, rtn
        self.isolated, self.expected, self.in_model, self.arithmetic = (
            SignalToNoise(),
            SignalToNoise(),
            SignalToNoise(),
            SignalToNoise(),
        )
        self.repaired, self._weight = SignalToNoise(), weight
        self.absmax: Tensor | None = None
        self.rows = 0

    def compare(self, x: Tensor, wanted: Tensor) -> None:
        """Rows of inputs of the float layer, and what it made of them."""
        self.rows += len(x)
        module, dtype = self.quantized, self.quantized.weight.dtype
        x_device = x.to(module.weight.device)
        x_device = x_device.to(dtype) if x_device.is_floating_point() else x_device
        got, wanted = module(x_device).float(), wanted.to(module.weight.device).float()
        if self.rtn is not None:
            self.isolated.add(wanted, got)
        if not x_device.is_floating_point():
            if self.rtn is not None:
                self.expected.add(wanted, embedding(x_device, self.rtn.dequantize(torch.float32)))
            return
        largest = x.abs().amax(0).float().cpu()
        self.absmax = largest if self.absmax is None else torch.maximum(self.absmax, largest)
        bias, float_bias = getattr(module, "bias", None), getattr(self.original, "bias", None)
        if self._weight is not None:
            self.repaired.add(wanted, linear(x_device.float(), self._weight, _wide(float_bias, x_device.float())))
        if self.activation is None:
            wide = x_device.float()
            if self.rtn is not None:
                self.expected.add(wanted, linear(wide, self.rtn.dequantize(torch.float32), _wide(float_bias, wide)))
            transform = getattr(module, "transform", None)
            wide = wide if transform is None else transform(x_device).float()
            if bool(torch.isfinite(got).all()):
                self.arithmetic.add(linear(wide, module.weight.dequantize(torch.float32), _wide(bias, wide)), got)
            return
        if self.rtn is None:
            return
        static = getattr(module, "input_scale", None)
        if static is not None:
            static = (self.absmax.max() / self.activation.fmt.symmetric_max).to(static)
        bias = None if float_bias is None else nn.Parameter(float_bias.detach().to(x_device), requires_grad=False)
        self.expected.add(wanted, QLinear(self.rtn, bias, self.activation, static)(x_device).float())

    @property
    def activation(self) -> Any:
        """The scheme that inputs are rounded to, or None."""
        return getattr(self.quantized, "activation", None)


class Overflow(NamedTuple):
    """The first module of the quantized model whose outputs are not finite: how many of how many are bad, their dtype, and
    the largest that the float model has there."""

    name: str
    bad: int
    total: int
    dtype: torch.dtype
    largest: float


class Runs:
    """Runs of both models on the same batches, with ``pairs`` of layers and the ``blocks`` listened to.

    Padding counts nowhere. After :meth:`add`: ``blocks``, the error of what each gives in the quantized model; ``overflow``;
    ``kl``, ``agreement`` and ``tokens``, for models with logits.
    """

    def __init__(self, original: nn.Module, quantized: nn.Module, pairs: Sequence[Pair], blocks: Sequence[str]) -> None:
        self._original, self._quantized, self._pairs = original, quantized, pairs
        self._padding = Padding(original), Padding(quantized)
        self.blocks: dict[str, SignalToNoise] = {name: SignalToNoise() for name in blocks}
        self.overflow: Overflow | None = None
        self._kl = self._agreed = 0.0
        self.tokens = 0

    def add(self, batch: Batch) -> None:
        """One batch more. Raises ``ValueError`` where the float model gives NaN or infinity."""
        float_outputs: dict[str, list[Tensor]] = {}
        largest: dict[str, float] = {}
        before, after = self._padding
        with before.tracking_encoder(), _observe(self._original, self._float_callback(batch, float_outputs, largest)):
            wanted = call(self._original, batch, _device(self._original))
        final = next((leaf for leaf in tree_leaves([_logits(wanted), wanted]) if isinstance(leaf, Tensor)), None)
        if final is not None and not bool(torch.isfinite(before.without_padding(final, batch)).all()):
            raise ValueError("the float model gives NaN or infinity on this data: look at it before its quantized version")
        with after.tracking_encoder(), _observe(self._quantized, self._quantized_callback(batch, float_outputs, largest)):
            got = call(self._quantized, batch, _device(self._quantized))
        if _logits(wanted) is not None:
            self._compare(token_logits(wanted, batch, before), token_logits(got, batch, after))

    def _float_callback(self, batch: Batch, float_outputs: dict[str, list[Tensor]], largest: dict[str, float]) -> _Callback:
        pairs = {id(pair.original): pair for pair in self._pairs}

        def callback(name: str, module: nn.Module, x: Tensor | None, found: Tensor) -> None:
            found = self._padding[0].without_padding(found, batch, name, x)
            largest[name] = max(largest.get(name, 0.0), float(found.abs().max()) if found.numel() else 0.0)
            pair = pairs.get(id(module))
            if pair is None and name not in self.blocks:
                return
            rows = _rows(found, found.shape[-1])
            float_outputs.setdefault(name if pair is None else pair.name, []).append(rows.float().cpu())
            if pair is not None and x is not None:
                x = self._padding[0].without_padding(x, batch, name)
                pair.compare(_rows(x, x.shape[-1] if x.is_floating_point() else 1), rows)

        return callback

    def _quantized_callback(
        self, batch: Batch, float_outputs: dict[str, list[Tensor]], largest: Mapping[str, float]
    ) -> _Callback:
        pairs = {id(pair.quantized): pair for pair in self._pairs}

        def callback(name: str, module: nn.Module, x: Tensor | None, found: Tensor) -> None:
            found = self._padding[1].without_padding(found, batch, name, x)
            if self.overflow is None and math.isfinite(largest.get(name, math.nan)):
                count = int((~torch.isfinite(found)).sum())
                if count:
                    self.overflow = Overflow(name, count, found.numel(), found.dtype, largest[name])
            pair = pairs.get(id(module))
            ratio = self.blocks.get(name) if pair is None else pair.in_model
            pending = float_outputs.get(name if pair is None else pair.name)
            if ratio is not None and pending:
                rows, wanted = _rows(found, found.shape[-1]).cpu(), pending.pop(0)
                if rows.shape == wanted.shape:  # an expert hears other tokens where its router hears other numbers
                    ratio.add(wanted, rows)

        return callback

    def _compare(self, wanted: Tensor, got: Tensor) -> None:
        width = wanted.shape[-1]
        x, y = _rows(wanted, width, 4 * _ROWS).float(), _rows(got, width, 4 * _ROWS).float().to(wanted.device)
        p, q = x.log_softmax(-1), y.log_softmax(-1)
        self._kl += float((p.exp() * (p - q)).sum(-1, dtype=torch.float64).sum())
        self._agreed += int((x.argmax(-1) == y.argmax(-1)).sum())
        self.tokens += len(x)

    @property
    def kl(self) -> float | None:
        return self._kl / self.tokens if self.tokens else None

    @property
    def agreement(self) -> float | None:
        return self._agreed / self.tokens if self.tokens else None


_Callback = Callable[[str, nn.Module, Tensor | None, Tensor], None]


@contextlib.contextmanager
def _observe(model: nn.Module, callback: _Callback) -> Iterator[None]:
    """Within the block ``callback`` is told of every module that gave numbers: its name, itself, and the first tensors that it
    was given and that it gave."""

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found = _first_tensor(output)
            if found is not None and found.is_floating_point() and found.dim():
                callback(name, module, _first_tensor((args, kwargs)), found)

        return after

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(hook(name), with_kwargs=True).remove)
        yield


def _rows(x: Tensor, width: int, limit: int = _ROWS) -> Tensor:
    """Some rows of ``x``, evenly; single numbers where ``width`` is 1 (indices)."""
    rows = x.detach().reshape(-1) if width == 1 and not x.is_floating_point() else x.detach().reshape(-1, width)
    places = torch.linspace(0, len(rows) - 1, min(len(rows), limit), dtype=torch.float64).round().long()
    return rows[places.to(rows.device)]


def _wide(bias: Tensor | None, like: Tensor) -> Tensor | None:
    return None if bias is None else bias.detach().to(like)


def _first_tensor(output: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)


def _logits(output: Any) -> Tensor | None:
    with contextlib.suppress(ValueError):
        return logits_of(output)
    return None


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
