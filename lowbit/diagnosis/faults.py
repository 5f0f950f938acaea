"""Ways in which stored weights go wrong: each is undone, and the one that brings the float weight back is the culprit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..grid import Scales
from ..tensor import QTensor

__all__ = ["identify_fault"]

_MIN_GAIN_DB = 4.0  # dB that undoing a mistake has to bring: rounding noise does not follow any of these patterns
_MAX_SEARCHED = 1 << 13  # rows or columns at most that are looked for in another order

Fault = Callable[[QTensor, Tensor], Iterator[tuple[str, Tensor]]]


def identify_fault(
    weight: QTensor, before: Tensor, db: Callable[[Tensor], float], threshold_db: float
) -> tuple[str, float] | None:
    """What is wrong with the canonical ``weight`` [N, K], and the decibels of it put right, as ``db`` takes them; None
    where nothing that is known brings it to ``threshold_db``. ``before``: the float weight, in float32."""
    now = db(weight.dequantize(torch.float32))
    best: tuple[str, float] | None = None
    for fault in _FAULTS:
        for description, dense in fault(weight, before):
            found = db(dense)
            if found >= max(now + _MIN_GAIN_DB, threshold_db) and (best is None or found > best[1]):
                best = description, found
    return best


def _with(weight: QTensor, packed: Tensor | None = None, scales: Scales | None = None) -> Tensor:
    """The numbers of ``weight`` with other codes or scales."""
    parts = Scales(weight.scale, weight.zero_point, weight.outer) if scales is None else scales
    packed = weight.packed if packed is None else packed
    return QTensor(packed, parts.scale, parts.zero_point, parts.outer, weight.scheme, tuple(weight.shape)).dequantize(
        torch.float32
    )


def _nibbles(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    p = weight.packed
    yield "the two halves of every byte are swapped (nibbles in the other order)", _with(weight, (p >> 4) | (p << 4))


def _fields(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    bits = weight.scheme.bits
    if bits not in (1, 2):  # of 4 bits these are the nibbles
        return
    p, found, mask = weight.packed, torch.zeros_like(weight.packed), (1 << bits) - 1
    for place in range(0, 8, bits):
        found |= ((p >> place) & mask) << (8 - bits - place)
    yield "the codes stand in every byte in the other order", _with(weight, found)


def _offset(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    zero = weight.zero_point
    if zero is None:
        return
    for step in (1, -1):
        wanted = zero.to(torch.float32) + step
        if weight.scheme.zero_point == "int":
            wanted = wanted.clamp(0, weight.scheme.fmt.max)
        shifted = Scales(weight.scale, wanted.to(zero.dtype), weight.outer)
        yield f"the zero points are {'below' if step > 0 else 'above'} what they should be by one", _with(weight, scales=shifted)


def _sign_bit(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    scheme = weight.scheme
    if scheme.fmt.step is None or not scheme.fmt.signed:
        return
    codes = weight.codes() ^ (1 << (scheme.bits - 1))
    scales = Scales(weight.scale, None, weight.outer)
    dense = QTensor.from_codes(codes, scales, scheme).dequantize(torch.float32)
    yield "the codes are read as two's complement and were written with an offset (or the other way round)", dense


def _sign(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "every weight has the other sign", -weight.dequantize(torch.float32)


def _factor(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    dense = weight.dequantize(torch.float32)
    energy = float(dense.double().square().sum())
    gain = float((dense.double() * before.double()).sum()) / energy if energy else 0.0
    if gain > 0:
        yield (
            f"every weight is {1 / gain:.3g} times what it should be (the tensor's own scale is wrong or left out)",
            dense * gain,
        )


def _transposed_scales(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    n, groups = weight.scale.shape
    if groups < 2 or n < 2:
        return

    def transposed(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.reshape(groups, n).T.contiguous()

    scale = transposed(weight.scale)
    assert scale is not None
    dense = _with(weight, scales=Scales(scale, transposed(weight.zero_point), weight.outer))
    yield "the scales lie in the order of their transpose", dense


def _transposed(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    if weight.shape[0] == weight.shape[1]:
        yield "the weight is transposed", weight.dequantize(torch.float32).T


def _order(weight: QTensor, before: Tensor) -> Iterator[tuple[str, Tensor]]:
    dense = weight.dequantize(torch.float32)
    for dim, description in ((0, "rows"), (1, "columns")):
        if not 2 <= dense.shape[dim] <= _MAX_SEARCHED:
            continue
        a, b = (before, dense) if dim == 0 else (before.T, dense.T)
        likeness = _unit(a) @ _unit(b).T
        order = likeness.argmax(1)
        if len(order.unique()) > 0.9 * len(order) and not bool((order == torch.arange(len(order), device=order.device)).all()):
            yield f"the {description} are in another order", dense.index_select(dim, order)


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)


_FAULTS: tuple[Fault, ...] = (_nibbles, _fields, _offset, _sign_bit, _sign, _factor, _transposed_scales, _transposed, _order)
