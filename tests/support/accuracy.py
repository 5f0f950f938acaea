"""How far a kernel's result may be from the exact one: derived from its contract, never chosen.

The exact result y = sum_k x_k w_k + b is taken in float64 from the same quantized weights. With S = sum_k |x_k| |w_k|:

**fp32 sums.** A sum of n terms in any order, each operation rounded by a relative d with |d| <= u, is within
gamma(n) * sum |terms|, gamma(n) = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1
and 4.2). A term x_k (q_k - z) s passes at most: its product, K additions (within its group, of the groups, of split-K
slices), the products with the scale and the outer scale, and the addition of the bias; where x and w are themselves
dequantized to fp32, two roundings each: n = K + 8. u is 2**-23, not 2**-24: tensor cores cut off where other units
round to nearest. What the float64 oracle itself rounds does not count at these sizes.

**The output.** Rounded once: u_out (|y| + the error so far), and in its subnormal range half of its smallest number.

**Underflow.** Each fp32 product or sum below 2**-126 may lose half of 2**-149; there are at most 2 K + 8.

**"exact"** allows for what is lost below 2**-126 before a group's scale multiplies it: 2**-150 of each of 2 K products and sums,
times the scale and what the kernel's numbers count. Rows of x are taken times a power of two where max |x| is below 2**-64, so
that 2**-150 is no more than 2**-86 max |x|; and a group that is not of zeros has a weight of at least 2**-17 of its scale
times that unit, the smallest number of e4m3. So y loses at most K 2**-68 max |x| sum |w|.

**"split-int8 (3 limbs)"** allows on top of the sums what writing x in limbs costs: in each slice of 512 columns (or of 256, whose
bound is smaller) x is rounded to a multiple of 2**(e - 21), 2**e <= max |x| of the slice, so it is off by at most 2**-22
max |x|, and y by the sum over slices of that times sum |w| there. Its limbs to the base 256 are as large as 3 |x| in sum,
but a term passes at most K / 32 + 8 roundings to nearest (u = 2**-24), so n = K + 8 at u = 2**-23 covers them.

**"split-int8 (2 limbs)"** is the same with x rounded to a multiple of 1/32639 of max |x| of the slice, the largest of two limbs:
x is off by at most max |x| / 65278, and by the three roundings of that unit, its inverse and their product, of which the two
spare ones of n take care.

**"fp8 sums"** allows on top of fp32 sums what the tensor cores of sm_90 lose with e4m3: they add 32 products and the sum so
far at the exponent of the largest of them and keep 13 bits below its leading one, so that each of 33 terms may lose 2**-13
of it, and the new sum as much of itself. Every 128 columns that sum is added to one in fp32. The products themselves, of
codes as they are stored, are exact, and a scale a row of x and of w moves no exponent against another's by more than one.

**"weights rounded once"** allows on top of that what the reference does. Each weight is rounded to the dtype of x:
|d| <= u_x, or in the subnormal range half of its smallest number. PyTorch adds the bias of some shapes after it has
rounded the product, which rounds |y - b| once more. And its bf16 product on a CPU with AVX512_BF16 takes every subnormal
x, w, product and sum for zero, so that each of them may lose 2**-126.

**An epilogue** f(y) has |f'| <= 1.13 (GELU; SiLU 1.1), so an error of y grows by no more. On top of that comes its own, at
u = 2**-24. exp(-|v|) is 2**(-|v| log2 e): the product and its constant are off by 1.5 |v| u, the instruction by 2**-22 at most,
so e by (2 |v| + 8) u with what is below 2**-126 lost; the sigmoid's sum, division (2**-22) and the product with y make it
(2 |v| + 16) u for SiLU. In GELU's cubic v passes six roundings, so (8 |v| + 16) u; torch writes it with tanh, and with erf there
is a sum with 1 too: both cost up to 8 u |y|. Where a row does not take it, torch applies it to the y that was rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["EPILOGUES", "linear_bound", "weight_bound"]

_FP32 = 2.0**-23


def _unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def _least(dtype: torch.dtype) -> float:
    """The largest absolute error of one rounding to nearest in the subnormal range."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def gamma(n: int, unit: float = _FP32) -> float:
    """Relative error bound of n successive roundings."""
    return n * unit / (1 - n * unit)


def _slices(a: Tensor) -> Tensor:
    """[..., K] cut into [..., slices, 512], with zeros at the end."""
    return torch.nn.functional.pad(a, (0, -a.shape[-1] % 512)).unflatten(-1, (-1, 512))


def _lost_in_fp8_sums(x: Tensor, w: Tensor) -> Tensor:
    """What sums of e4m3 products may lose in the tensor cores, [..., M, N], for x [..., M, K] and w [N, K]."""
    lost = x.new_zeros(*x.shape[:-1], w.shape[-2])
    for first in range(0, x.shape[-1], 128):
        total = torch.zeros_like(lost)
        for at in range(first, min(first + 128, x.shape[-1]), 32):
            terms = x[..., None, at : at + 32] * w[:, at : at + 32]
            largest = torch.maximum(terms.abs().amax(-1), total.abs() + lost)
            total = total + terms.sum(-1)
            lost = lost + 2.0**-13 * (33 * largest + total.abs())
    return lost


EPILOGUES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
}


def _lost_in_epilogue(name: str, y: Tensor) -> Tensor:
    if name in ("none", "relu"):
        return torch.zeros_like(y)
    v = y.abs() if name != "gelu_tanh" else 1.6 * (y.abs() + 0.044715 * y.abs() ** 3)
    times = {"silu": 2, "gelu": 0, "gelu_tanh": 8}[name]
    lost = (times * v + 16) * 2.0**-24 * EPILOGUES[name](y).abs() + 2.0**-126 * y.abs()
    return lost if name == "silu" else lost + 8 * 2.0**-24 * y.abs()


def linear_bound(
    contract: str, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, dtype: torch.dtype, epilogue: str = "none",
    within: bool = True,
) -> Tensor:  # fmt: skip
    """The largest allowed |error| of each element of ``y`` [..., N], the exact result for ``x`` [..., K] and ``w`` [N, K]; of its
    ``epilogue``, which the kernel applied itself, or to what it had rounded (not ``within``).

    ``x``, ``w``, ``bias`` and ``y`` are float64, ``dtype`` is what the kernel took and gave.
    """
    k = x.shape[-1]
    magnitude = x.abs() @ w.abs().mT
    shift = torch.zeros_like(y) if bias is None else bias.expand_as(y)
    error = gamma(k + 8) * (magnitude + shift.abs()) + (2 * k + 8) * 2.0**-150
    if contract == "exact":
        error = error + k * 2.0**-68 * x.abs().amax(-1, keepdim=True) * w.abs().sum(-1)[..., None, :] if k else error
    elif contract == "split-int8 (3 limbs)":
        error = error + 2.0**-22 * (_slices(x.abs()).amax(-1) @ _slices(w.abs()).sum(-1).mT)
    elif contract == "split-int8 (2 limbs)":
        error = error + (_slices(x.abs()).amax(-1) @ _slices(w.abs()).sum(-1).mT) / 65278
    elif contract == "fp8 sums":
        error = error + _lost_in_fp8_sums(x, w)
    elif contract == "weights rounded once":
        error = error + _unit(dtype) * magnitude + _least(dtype) * x.abs().sum(-1, keepdim=True)
        if dtype == torch.bfloat16:
            error = error + 2.0**-126 * (x.abs().sum(-1, keepdim=True) + w.abs().sum(-1)[..., None, :] + 2 * k)
        if bias is not None:
            error = error + _unit(dtype) * ((y - shift).abs() + error) + _least(dtype)
    else:
        raise ValueError(f"no bound is known for the contract {contract!r}")
    if not within:
        error = error + _unit(dtype) * (y.abs() + error) + _least(dtype)
    if epilogue != "none":
        y, error = EPILOGUES[epilogue](y), 1.13 * error + _lost_in_epilogue(epilogue, y)
    return error + _unit(dtype) * (y.abs() + error) + _least(dtype)


def weight_bound(w: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest allowed |error| of each weight that is computed in fp32 (two roundings) and rounded once to ``dtype``."""
    return (_unit(dtype) + gamma(3)) * w.abs() + _least(dtype)
