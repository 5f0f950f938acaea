"""Products with a QTensor are those with its dequantized weight, gradients too; what makes no sense says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit import QTensor, Scheme
from tests.lowbit.test_tensor import FAMILIES, PROPERTY, make, schemes

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def close(y: Tensor, x: Tensor, weight: Tensor, expected: Tensor) -> None:
    """``y`` is ``expected`` (float64) but for one rounding of each weight, of the sum and of each partial sum."""
    assert y.shape == expected.shape
    assert y.dtype == x.dtype
    k = x.shape[-1]
    accumulate = 2.0**-52 if x.dtype == torch.float64 else 2.0**-23
    reach = x.detach().double().abs().sum(-1, keepdim=True) * float(weight.detach().abs().amax() if weight.numel() else 0) + 1
    assert bool(((y.detach().double() - expected).abs() <= reach * (2 * EPS[x.dtype] + (k + 4) * accumulate)).all())


def numbers(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@PROPERTY
@given(schemes, st.sampled_from((1, 2, 7, 40)), st.integers(0, 5), st.sampled_from(sorted(EPS, key=str)), st.integers(0, 9))
def test_every_way_to_multiply(scheme: Scheme, k: int, n: int, dtype: torch.dtype, m: int) -> None:
    q, x, bias = make(scheme, n, k), numbers(m, k, dtype=dtype), numbers(n, dtype=dtype)
    w = q.dequantize(torch.float64)
    plain = x.double() @ w.T
    for y in (F.linear(x, q), x @ q.t(), x.mm(q.T), (q @ x.T).T, torch.matmul(x, q.mT), F.linear(input=x, weight=q)):
        close(y, x, w, plain)
    for y in (F.linear(x, q, bias), torch.addmm(bias, x, q.t())):
        close(y, x, w, plain + bias.double())
    close(F.linear(x.expand(2, m, k), q), x.expand(2, m, k), w, plain.expand(2, m, n))
    close(x.expand(2, m, k) @ q.t(), x.expand(2, m, k), w, plain.expand(2, m, n))
    close((q @ x.T.expand(2, k, m)).mT, x.expand(2, m, k), w, plain.expand(2, m, n))
    if m:
        for y in (F.linear(x[0], q), x[0] @ q.t(), q @ x[0], q.mv(x[0])):
            close(y, x[0], w, plain[0])
    if n:
        close(F.linear(x, q[0])[:, None], x, w, plain[:, :1])
    across = numbers(m, n, dtype=dtype)
    for y in (across @ q, F.linear(across, q.t()), (q.t() @ across.T).T):
        close(y, across, w, across.double() @ w)
    close((q.t() @ across.T.expand(2, n, m)).mT, across.expand(2, m, n), w, (across.double() @ w).expand(2, m, k))
    close(across.expand(2, m, n) @ q, across.expand(2, m, n), w, (across.double() @ w).expand(2, m, k))


@PROPERTY
@given(schemes, st.sampled_from((1, 7, 40)), st.integers(0, 3), st.sampled_from(sorted(EPS, key=str)))
def test_batches(scheme: Scheme, k: int, experts: int, dtype: torch.dtype) -> None:
    q, x = make(scheme, experts, 5, k), numbers(experts, 4, k, dtype=dtype)
    w = q.dequantize(torch.float64)
    expected = torch.bmm(x.double(), w.mT)
    for y in (torch.bmm(x, q.mT), x @ q.transpose(1, 2), (q @ x.mT).mT, torch.bmm(q, x.mT).mT):
        close(y, x, w, expected)
    across = numbers(experts, 4, 5, dtype=dtype)
    for y in (torch.bmm(across, q), torch.bmm(q.mT, across.mT).mT):
        close(y, across, w, torch.bmm(across.double(), w))
    if experts:
        close(F.linear(x[0], q[0]), x[0], w, expected[0])


@PROPERTY
@given(schemes, st.sampled_from((0, 1, 7, 40)))
def test_embedding(scheme: Scheme, k: int) -> None:
    q = make(scheme, 6, k, dtype=torch.bfloat16)
    dense = q.dequantize()
    several = torch.tensor([[5, 0], [2, 2]])
    for index in (several, several.int(), several[:, :0], torch.tensor(3)):
        assert torch.equal(F.embedding(index, q), F.embedding(index, dense))
        assert torch.equal(F.embedding(index, q, padding_idx=1), F.embedding(index, dense))


# ---- gradients -------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear": (lambda x, b, q: F.linear(x, q, b), lambda x, b, w: F.linear(x, w, b)),
    "addmm": (lambda x, b, q: torch.addmm(b, x, q.t()), lambda x, b, w: F.linear(x, w, b)),
    "scaled addmm": (lambda x, b, q: torch.addmm(b, x, q.t(), beta=2, alpha=3), lambda x, b, w: 3 * x @ w.T + 2 * b),
    "matmul": (lambda x, b, q: (x @ q.t() + b) @ q, lambda x, b, w: (x @ w.T + b) @ w),
    "from the left": (lambda x, b, q: (q @ x.T).T + b, lambda x, b, w: x @ w.T + b),
    "slices": (lambda x, b, q: F.linear(x[:, :16], q[:, :16], b), lambda x, b, w: F.linear(x[:, :16], w[:, :16], b)),
}


def gradients_agree(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values, gradients and gradients of gradients in float64 are those of the dense computation."""
    out = numbers(*plain(*inputs).shape, seed=5).requires_grad_()
    found = []
    for function in (ours, plain):
        y = function(*inputs)
        first = torch.autograd.grad(y, inputs, out, create_graph=True)
        found.append((y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), out)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", ["int8", "int3", "nvfp4", FAMILIES[-3]], ids=str)
def test_gradients_of_x_and_bias(way: str, scheme: Scheme | str) -> None:
    q = make(scheme, 5, 24, dtype=torch.float64)
    x, bias = numbers(3, 24).requires_grad_(), numbers(5).requires_grad_()
    ours, plain = WAYS[way]
    gradients_agree(lambda x, b: ours(x, b, q), lambda x, b: plain(x, b, q.dequantize()), x, bias)
    assert not F.linear(x.detach(), q).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, bias, q), plain(x, bias, q.dequantize()))


@pytest.mark.parametrize("scheme", ["int4", "nvfp4"])
def test_gradients_of_batches(scheme: str) -> None:
    q = make(scheme, 2, 5, 24, dtype=torch.float64)
    w, x = q.dequantize(), numbers(2, 3, 24).requires_grad_()
    gradients_agree(lambda x: torch.bmm(x, q.mT), lambda x: torch.bmm(x, w.mT), x)
    gradients_agree(lambda x: (q @ x.mT).mT @ q, lambda x: (w @ x.mT).mT @ w, x)
    gradients_agree(lambda x: F.linear(x[0], q[0]), lambda x: F.linear(x[0], w[0]), x)


def test_operators_with_bias_and_their_gradients() -> None:
    q = make("int4", 2, 5, 24, dtype=torch.float64)
    parts = (q.packed, q.scale, q.zero_point, q.outer)
    x, bias = numbers(2, 3, 24).requires_grad_(), numbers(2, 5).requires_grad_()
    gradients_agree(
        lambda x, b: torch.ops.lowbit.grouped_linear(x, *parts, b, str(q.scheme), "canonical"),
        lambda x, b: torch.baddbmm(b[:, None], x, q.dequantize().mT),
        *(x, bias),
    )
    # The rounding of x passes gradients as the identity does.
    one, rows = q[0], numbers(3, 24).requires_grad_()
    y = torch.ops.lowbit.quantized_linear(
        rows, one.packed, one.scale, one.zero_point, None, bias[0], str(one.scheme), "canonical", "int8:row:fp32", None
    )
    out = numbers(3, 5)
    grad_rows, grad_bias = torch.autograd.grad(y, (rows, bias), out)
    torch.testing.assert_close(grad_rows, out @ one.dequantize())
    torch.testing.assert_close(grad_bias[0], out.sum(0))


def test_beta_zero_ignores_a_nan() -> None:
    q, x = make("int8", 3, 8), numbers(2, 8, dtype=torch.float32)
    assert torch.equal(torch.addmm(torch.full((3,), torch.nan), x, q.t(), beta=0), x @ q.t())


# ---- what makes no sense ---------------------------------------------------------------------------------------

Q, E, N4, X = make("int4", 6, 40), make("int4", 3, 6, 40), make("nvfp4", 6, 40), numbers(5, 40, dtype=torch.float32)
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: QTensor.quantize(Q, "int8"), TypeError, r"weight is quantized already \(uint4:.*\): use requantize"),
    (
        lambda: QTensor.quantize(X.int(), "int8", name="head"),
        TypeError,
        "head must be float16, bfloat16",
    ),
    (lambda: QTensor.quantize(X[0], "int8"), ValueError, r"weight must have at least two dimensions \[..., N, K\], got \(40,\)"),
    (lambda: QTensor.quantize(X, "int9"), ValueError, "no scheme named 'int9'; did you mean int8"),
    (lambda: QTensor.quantize(X, "int8", method="best"), ValueError, "method must be one of range, absmax, mse, got 'best'"),
    (lambda: Q.error(X), ValueError, r"w must have shape \(6, 40\), got \(5, 40\)"),
    (lambda: Q.to_layout("best"), ValueError, "no layout named 'best'; there are canonical"),
    (lambda: Q.int(), TypeError, r"must be float, got torch.int32: use codes\(\)"),
    (lambda: Q[None], NotImplementedError, r"call .dequantize\(\) first"),
    (lambda: Q[:, ::2], ValueError, "a slice along K must have step 1, got 2"),
    (lambda: Q[0, 1], ValueError, "a column of a QTensor is not on a byte's bounds"),
    (lambda: Q[:, [0, 1]], ValueError, "columns of a QTensor cannot be gathered"),
    (lambda: Q[X[:, :6] > 0], ValueError, "one index tensor of one dimension"),
    (lambda: Q[torch.tensor([[0, 1]])], ValueError, "one index tensor of one dimension"),
    (lambda: Q[6], IndexError, "index 6 is out of bounds"),
    (lambda: Q.select(0, 7), IndexError, "out of (range|bounds)"),
    (lambda: Q.transpose(0, 2), IndexError, r"dimension must be -2..1, got 2"),
    (lambda: E.transpose(0, 1), ValueError, "only the last two dimensions of a QTensor can be swapped"),
    (lambda: Q.view(120, 2), ValueError, r"a QTensor keeps its shape \(6, 40\), got \(120, 2\)"),
    (lambda: Q.split(0), ValueError, "split needs pieces of at least 1, got 0"),
    (lambda: Q.split([2, 3]), ValueError, r"split sizes must add up to 6, got \[2, 3\]"),
    (lambda: torch.cat([Q, X]), TypeError, "cat mixes a QTensor with a float tensor"),
    (lambda: torch.cat([Q, N4]), ValueError, "cat needs one scheme and orientation, got .*: requantize first"),
    (lambda: torch.cat([Q, E]), ValueError, r"shapes \(6, 40\) and \(3, 6, 40\) do not match"),
    (lambda: torch.cat([Q, Q[:, :8]]), ValueError, r"shapes \(6, 40\) and \(6, 8\) do not match"),
    (lambda: torch.cat([Q, Q], 1), ValueError, "cat along K needs whole groups and whole bytes: K=40 with group_size 128"),
    (lambda: torch.cat([N4, make("nvfp4", 6, 40, seed=1)]), ValueError, "cat of matrices with different outer scales"),
    (lambda: torch.stack([Q, Q], 1), ValueError, "stack makes a dimension before the matrices"),
    (lambda: Q.clone().copy_(X), RuntimeError, r"expand|must match"),
    (lambda: Q.clone().copy_(N4), ValueError, "copy_ needs one scheme"),
    (lambda: Q.clone().copy_(Q[:3]), ValueError, r"copy_ needs equal shapes, got \(6, 40\) and \(3, 40\)"),
    # 39 codes of 4 bits take as many bytes as 40, so K has to be compared.
    (lambda: F.linear(X[:, :39], Q), ValueError, r"x must end in 40 features, got shape \(5, 39\)"),
    (lambda: X[:, :39] @ Q.t(), ValueError, r"x must end in 40 features, got shape \(5, 39\)"),
    (lambda: torch.bmm(X[:3, None, :39], E.mT), ValueError, r"x must end in 40 features, got shape \(3, 1, 39\)"),
    (lambda: F.linear(X, E), ValueError, r"linear takes a weight \[N, K\], got \(3, 6, 40\): index it, or use bmm"),
    (lambda: F.linear(X, Q, X[0]), ValueError, r"bias must have shape \(6,\), got \(40,\)"),
    (lambda: F.linear(X.int(), Q), TypeError, "x must be float16, bfloat16, float32 or float64, got torch.int32"),
    (lambda: torch.mm(Q, Q.t()), NotImplementedError, "a product of two QTensors: dequantize one of them"),
    (lambda: F.linear(Q, Q), NotImplementedError, "a product of two QTensors"),
    (lambda: torch.einsum("mk,nk->mn", X, Q), NotImplementedError, r"call .dequantize\(\) first"),
    (lambda: F.embedding(torch.tensor([0]), E), ValueError, r"an embedding takes a QTensor \[N, K\]"),
    (lambda: F.embedding(torch.tensor([0]), Q, max_norm=1.0), ValueError, "no max_norm"),
    (lambda: F.embedding(torch.tensor([6]), Q), IndexError, "embedding indices must be 0..5, got 6..6"),
]


@pytest.mark.parametrize(("act", "error", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_uses_say_what_is_wrong(act: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


@pytest.mark.parametrize("bad", [[torch.nan], [torch.inf, -torch.inf], [torch.nan, torch.inf, torch.nan]], ids=str)
def test_what_is_not_finite_raises_with_name_and_count(bad: list[float]) -> None:
    for dtype in EPS:
        w = torch.zeros(3, 4, dtype=dtype)
        w.view(-1)[: len(bad)] = torch.tensor(bad, dtype=dtype)
        nan, infinite = int(w.isnan().sum()), int(w.isinf().sum())
        with pytest.raises(ValueError, match=f"^model.head.weight holds {nan} NaN and {infinite} infinite values"):
            QTensor.quantize(w, "int4", name="model.head.weight")
