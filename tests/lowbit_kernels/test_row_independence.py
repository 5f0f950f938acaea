"""No row of x has a say in the products of another, whatever numbers it holds: the same bits from the same kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowbit import QLinear, QTensor, Scheme
from lowbit.scales import rounded_tokens
from lowbit.scheme import PLAIN_SCALES, SCHEMES
from lowbit_kernels.registry import Call, kernels, strict, trace
from tests.lowbit_kernels.test_kernels import Run, activations, linear_cases, make_bias, make_weight, make_x, runs
from tests.support import strategies  # noqa: F401 - its profile

# Triton's interpreter computes with numpy, which warns where a GPU goes on.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
NOT_FINITE = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def spoilt(x: Tensor, rows: Tensor, seed: int) -> tuple[Tensor, list[str]]:
    """``x`` [M, K] with other numbers in ``rows``, and what each of those holds now."""
    random, spoilt, info = torch.Generator().manual_seed(seed), x.clone(), torch.finfo(x.dtype)
    kinds = [*NOT_FINITE, "the largest", "the least", "small", "zeros"]
    held = []
    for place, row in enumerate(rows.tolist()):
        kind = kinds[(place + seed) % len(kinds)]
        column = int(torch.randint(x.shape[1], (), generator=random))
        if kind in NOT_FINITE:
            spoilt[row, column] = NOT_FINITE[kind]
        elif kind == "the largest":
            spoilt[row, column] = info.max
        elif kind == "zeros":
            spoilt[row] = 0
        else:  # two limbs have no unit for the least numbers, and sums of theirs would sink
            spoilt[row] *= info.smallest_normal * (info.eps if kind == "the least" else 1)
        held.append(kind)
    return spoilt, held


def some_rows(m: int, seed: int) -> Tensor:
    """Rows to be spoilt, at least one and never all."""
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    return order[: max(1, m // 3)]


def assert_independent(x: Tensor, seed: int, product: Any, rounds: bool) -> None:
    """``product(x)`` of x [M, K], M above 1: other rows keep their bits, rows that are not finite are seen to be so."""
    rows = some_rows(x.shape[0], seed)
    others, (bad, held) = [m for m in range(x.shape[0]) if m not in rows], spoilt(x, rows, seed)
    with trace() as before:
        plain = product(x)
    with trace() as after:
        y = product(bad)
    assert before.counts == after.counts
    assert plain.isfinite().all()
    assert torch.equal(y[others], plain[others])
    for row, kind in zip(rows.tolist(), held, strict=True):
        if kind == "NaN" or (rounds and kind in NOT_FINITE):
            assert bool(y[row].isnan().all()), kind
        elif kind in NOT_FINITE:
            assert not bool(y[row].isfinite().any()), kind
        elif kind != "the largest":
            assert bool(y[row].isfinite().all()), kind


def cases(op: str, **more: Any) -> list[Any]:
    """Some of those of :mod:`tests.test_kernels` that have other rows: of each kernel the first, which differ most, two
    where Triton interprets them."""
    found: dict[str, list[Any]] = {}
    for case in linear_cases(op, ("plain", "strided", "transposed"), **more):
        run, _, sizes = case.values
        few = 17 if run.row.on_request else 65
        if sizes["m"] <= few and sizes["m"] * sizes.get("experts", 1) > 1 and sizes["n"] * sizes["k"] < 1 << 17:
            found.setdefault(case.id.split("-")[0] + run.device, []).append(case)
    return [case for some in found.values() for case in some[: 2 if some[0].values[0].row.on_request else 16]]


@pytest.mark.parametrize(("run", "scheme", "case"), cases("linear"))
def test_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    m, n, k, dtype = case["m"], case["n"], case["k"], case["dtype"]
    parts = make_weight(scheme, n, k).arranged(run.row.layout, scheme)
    bias = make_bias(dtype, n) if case["bias"] else None
    x = make_x(m, k, dtype, case["form"])
    assert_independent(x, m + n + k, lambda x: run.do("operator", scheme, x, *parts, bias).cpu(), rounds=False)


@pytest.mark.parametrize(("run", "scheme", "case"), cases("quantized_linear", activation=activations, static=(False, True)))
def test_quantized_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    m, n, k, dtype, activation = case["m"], case["n"], case["k"], case["dtype"], Scheme.parse(case["activation"])
    parts = make_weight(scheme, n, k).arranged(run.row.layout, scheme)
    bias = make_bias(dtype, n) if case["bias"] else None
    fits = case["static"] and activation.scale in PLAIN_SCALES and activation.zero_point == "none"
    rest = activation, torch.tensor(4 / activation.fmt.max) if fits else None
    x = make_x(m, k, dtype, case["form"])
    assert_independent(x, m + n + k, lambda x: run.do("operator", scheme, x, *parts, bias, rest=rest).cpu(), rounds=True)


@pytest.mark.parametrize(("run", "scheme", "case"), cases("grouped_linear", experts=(2,)))
def test_grouped_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    m, n, k, dtype = case["m"], case["n"], case["k"], case["dtype"]
    parts = make_weight(scheme, 2, n, k).arranged(run.row.layout, scheme)
    bias = make_bias(dtype, 2, n) if case["bias"] else None

    def product(x: Tensor) -> Tensor:
        return run.do("operator", scheme, x.reshape(2, m, k), *parts, bias).cpu().flatten(0, 1)

    assert_independent(make_x(2 * m, k, dtype, case["form"]), m + n + k, product, rounds=False)


@pytest.mark.parametrize(("run", "scheme", "case"), cases("experts_linear", experts=(3,)))
def test_experts_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    m, n, k, dtype = case["m"], case["n"], case["k"], case["dtype"]
    parts = make_weight(scheme, 3, n, k).arranged(run.row.layout, scheme)
    bias, chosen = make_bias(dtype, 3, n) if case["bias"] else None, torch.arange(3 * m) % 3

    def product(x: Tensor) -> Tensor:
        return run.do("operator", scheme, x.reshape(3 * m, k), *parts, bias, rest=(chosen,)).cpu()

    assert_independent(make_x(3 * m, k, dtype, case["form"]), m + n + k, product, rounds=False)


activation_schemes = st.sampled_from(
    [Scheme.parse(f"{name}:{group}:{scale}") for name in ("int8", "int4", "fp8_e4m3fn", "fp4_e2m1", "nf4")
     for group, scale in (("row", "fp32"), ("g32", "bf16"), ("g32", "fp16"), ("g32", "e8m0"), ("g16", "fp8_e4m3fn"),
                          ("g16", "fp8_e4m3fn:outer"), ("g32", "fp6_e2m3"))]
    + [Scheme.parse(f"uint8:{rest}")
       for rest in ("row:zint:fp32", "g32:zint:e8m0", "g16:zint:fp8_e4m3fn:outer", "g32:zfloat:bf16")]
)  # fmt: skip


@given(
    st.sampled_from(sorted(SCHEMES)), st.none() | activation_schemes, st.booleans(), st.sampled_from(DTYPES),
    st.sampled_from((2, 5, 16, 17, 33, 64, 65, 130)), st.sampled_from((1, 3, 32, 64)), st.sampled_from((16, 50, 64, 512, 1088)),
    st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=400)
def test_layers(
    weight: str, activation: Scheme | None, static: bool, dtype: torch.dtype, m: int, n: int, k: int, bias: bool, seed: int
) -> None:
    """By whichever kernel runs."""
    q = QTensor.quantize(make_x(n, k, dtype, "plain"), weight)
    fixed = torch.tensor(4 / activation.fmt.max) if static and activation is not None else None
    if fixed is not None and (activation.scale not in PLAIN_SCALES or activation.zero_point != "none"):
        fixed = None
    shift = nn.Parameter(make_bias(dtype, n), requires_grad=False) if bias else None
    layer = QLinear(q, shift, activation, fixed)
    # A scale in a narrow format saturates where a large number stands beside a bias.
    assert_independent(make_x(m, k, dtype, "plain"), seed, layer, rounds=activation is not None)


@given(activation_schemes, st.sampled_from(DTYPES), st.sampled_from((2, 5, 33)), st.sampled_from((1, 16, 50)), st.integers(0, 99))
def test_tokens_are_rounded_by_themselves(activation: Scheme, dtype: torch.dtype, m: int, k: int, seed: int) -> None:
    wide = dtype if dtype == torch.float64 else torch.float32
    x = spoilt(make_x(m, k, dtype, "plain"), some_rows(m, seed), seed)[0].to(wide)
    together, apart = rounded_tokens(x, activation), torch.cat([rounded_tokens(row, activation) for row in x.split(1)])
    assert torch.equal(together.nan_to_num(7), apart.nan_to_num(7))
    assert torch.equal(together.isnan(), ~x.isfinite())


def norms() -> Iterator[tuple[str, str, torch.dtype]]:
    """(row, scheme of the codes, dtype) of the norms that rows take."""
    schemes = ("int8:row:fp32", "fp8_e4m3fn:row:fp32", "int8:g32:bf16", "fp4_e2m1:g32:e8m0")
    rows = [param.values[0].row for param in runs("rms_norm_quantize") if not param.marks]
    for row, activation, dtype in itertools.product(rows, schemes, DTYPES):
        if row.refusal(Call("rms_norm_quantize", "cpu", 0, "canonical", Scheme.parse(activation), dtype, 5, 0, 64)) is None:
            yield row.name, activation, dtype


@pytest.mark.parametrize(("name", "activation", "dtype"), list(norms()))
def test_a_norm_that_ends_in_codes(name: str, activation: str, dtype: torch.dtype) -> None:
    row, scheme = next(row for row in kernels() if row.name == name), Scheme.parse(activation)
    weight = make_weight(Scheme.parse(f"{scheme.format}:row:fp32"), 33, 64)

    def product(x: Tensor) -> Tensor:
        if row.on_request:
            with strict(name):
                codes, scale = torch.ops.lowbit.rms_norm_quantize(x, None, 1e-6, activation)
        else:
            codes, scale = torch.ops.lowbit.rms_norm_quantize(x, None, 1e-6, activation)
        scheme_args = f"{scheme.format}:row:fp32", "canonical", activation
        return torch.ops.lowbit.codes_linear(codes, scale, *weight.parts, None, *scheme_args, 64, x.dtype)

    assert_independent(make_x(5, 64, dtype, "plain"), 3, product, rounds=True)
    assert_independent(make_x(17, 64, dtype, "plain"), 0, product, rounds=True)
