"""Every row of the registry against float64 of the same quantized weights, within the bound its contract names."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.formats import FORMATS, get_format
from lowbit.grid import Scales, to_codes, to_values
from lowbit.packing import pack, unpack
from lowbit.scales import choose
from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit_kernels.layouts import LAYOUTS, Parts
from lowbit_kernels.registry import Call, Kernel, kernels, strict
from tests.support.accuracy import linear_bound, weight_bound
from tests.support.row_cases import groups, scales, scheme_of, weights

MS = (1, 2, 7, 8, 9, 16, 17, 64, 65, 256)
NS = (1, 8, 33)
KS = (1, 16, 50, 200, 257)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = ("int8:row:fp32", "fp8_e4m3fn:row:fp32", "int8:g32:bf16", "fp8_e4m3fn:g32:e8m0", "uint8:row:zint:fp32")
FORMS = ("plain", "batched", "strided", "transposed", "outlier", "denormal")


# ---- cases -----------------------------------------------------------------------------------------------------


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few cases that hold every pair of values of two factors: each starts from a missing pair and adds greedily."""
    names = sorted(factors, key=lambda name: -len(factors[name]))
    missing = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name in names:
            if name not in case:
                gains = [
                    sum(pair in missing for chosen in case.items() for pair in ((chosen, (name, i)), ((name, i), chosen)))
                    for i in range(len(factors[name]))
                ]
                # Of equal gains the turn goes round, so that filler values spread.
                case[name] = max(range(len(gains)), key=lambda i: (gains[i], -((i + len(cases)) % len(gains))))
        for pair in itertools.permutations(case.items(), 2):
            missing.pop(pair, None)
        cases.append({name: factors[name][i] for name, i in case.items()})
    return cases


def edges(row: Kernel, axis: int, usual: tuple[int, ...]) -> tuple[int, ...]:
    """The usual sizes along an axis of (M, N, K), and one below, at and one above every tile of the row, or the multiples next to
    them."""
    near = (tile[axis] + step for tile in row.tiles for step in (-1, 0, 1))
    of = (1, *row.multiples)[axis]
    return tuple(sorted({-(-size // of) * of for size in (*usual, *near)}))


def ks(row: Kernel) -> tuple[int, ...]:
    return edges(replace(row, tiles=()), 2, KS)


def rows_of(row: Kernel, n: int) -> int:
    return -(-n // row.multiples[0]) * row.multiples[0]


def ms(row: Kernel) -> tuple[int, ...]:
    low, high = row.m
    return tuple(m for m in edges(row, 0, MS) if m >= max(low, 1) and (high is None or m <= high))


def activations(row: Kernel) -> tuple[str, ...]:
    """What x may be rounded to for the row: a kernel on codes takes few."""
    if row.formats is None:
        return ACTIVATIONS
    scheme = Scheme(min(row.formats), scale="fp32")
    call = Call(row.op, "cuda", 90, row.layout or "canonical", scheme, torch.float16, 1, 16, 16)
    return tuple(a for a in ACTIVATIONS if row.predicate(replace(call, activation=Scheme.parse(a))) is None)


class Run(NamedTuple):
    """A row on a device."""

    row: Kernel
    device: str

    def takes(self, name: str) -> bool:
        return self.row.formats is None or name in self.row.formats

    def do(self, by: str, scheme: Scheme, *args: Tensor | None, rest: tuple[Any, ...] = ()) -> Any:
        """Run the row itself, or the operator with no other row allowed; the tensors go to the device first."""
        if (reason := self.row.available()) is not None:
            pytest.skip(f"{self.row.name} is unavailable: {reason}")
        there = [on(self.device, arg) for arg in args]
        rest = tuple(on(self.device, arg) if isinstance(arg, Tensor) else arg for arg in rest)
        if by == "row":
            return self.row.run(*there, scheme, *rest)
        scheme_args = (str(scheme),) if self.row.op == "quantize" else (str(scheme), self.row.layout or "canonical")
        rest = tuple(str(arg) if isinstance(arg, Scheme) else arg for arg in rest)
        with strict(self.row.name):
            return getattr(torch.ops.lowbit, self.row.op)(*there, *scheme_args, *rest)


def on(device: str, tensor: Tensor | None) -> Tensor | None:
    """``tensor`` on a device with the strides it has here: ``to`` would make a view with gaps contiguous."""
    if tensor is None or device == "cpu":
        return tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def runs(op: str) -> list[Any]:
    """Every row of an operator, once on each kind of device that it takes and that tests know."""
    return [
        pytest.param(Run(row, device), marks=[pytest.mark.gpu] * (device == "cuda"), id=f"{row.name}-{device}")
        for row in kernels()
        for device in ("cpu", "cuda")
        if row.op == op and (row.devices is None or device in row.devices)
    ]


def dtypes_of(op: str, *dtypes: torch.dtype) -> list[Any]:
    """(row, dtype) for every row of an operator and each of the ``dtypes`` that it takes."""
    return [
        pytest.param(param.values[0], dtype, marks=param.marks, id=f"{param.id}-{dtype}")
        for param in runs(op)
        for dtype in dtypes
        if param.values[0].row.dtypes is None or dtype in param.values[0].row.dtypes
    ]


def linear_cases(op: str, forms: tuple[str, ...] = FORMS, **more: Any) -> list[Any]:
    """A pairwise cover of what each row of a matrix product takes; ``more``: factors that only this operator has, or what
    says them of a row."""
    params = []
    for param in runs(op):
        run = param.values[0]
        cover = pairwise(
            {
                "weight": weights(run.row),
                "group": groups(run.row),
                "scale": scales(run.row),
                "m": ms(run.row),
                "n": edges(run.row, 1, NS),
                "k": edges(run.row, 2, KS),
                "dtype": DTYPES if run.row.dtypes is None else tuple(d for d in DTYPES if d in run.row.dtypes),
                "bias": (True, False),
                "form": forms,
                "by": ("row", "operator"),
                **{name: values(run.row) if callable(values) else values for name, values in more.items()},
            }
        )
        for case in cover:
            scheme = scheme_of(case.pop("weight"), case.pop("group"), case.pop("scale"))
            name = "-".join(str(value).removeprefix("torch.") for value in case.values())
            params.append(pytest.param(run, scheme, case, marks=param.marks, id=f"{param.id}-{scheme}-{name}"))
    return params


# ---- data ------------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """A quantized weight and its float64 meaning [..., N, K], on the CPU."""

    parts: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    values: Tensor

    def on(self, device: str) -> tuple[Tensor | None, ...]:
        return tuple(on(device, part) for part in self.parts)

    def arranged(self, layout: str | None, scheme: Scheme) -> tuple[Tensor | None, ...]:
        """The parts as kernels of ``layout`` read them; None: canonical."""
        packed, scale, zero_point, outer = self.parts
        return *LAYOUTS[layout or "canonical"].arrange(Parts(packed, scale, zero_point), scheme, self.values.shape[-1]), outer


@lru_cache(maxsize=64)
def make_weight(scheme: Scheme, *shape: int) -> Weight:
    """Random codes of finite numbers with random scales and zero points: what a weight may hold, not how one is chosen."""
    random = torch.Generator().manual_seed(zlib.crc32(repr((scheme, shape)).encode()))
    *lead, n, k = shape
    fmt, groups = scheme.fmt, scheme.groups(k)
    finite = torch.tensor([code for code, value in enumerate(fmt.values) if math.isfinite(value)], dtype=torch.uint8)
    codes = finite[torch.randint(len(finite), shape, generator=random)]
    scale = (torch.rand(*lead, n, groups, generator=random) + 0.5) / max(-fmt.min, fmt.max)
    if scheme.outer:
        scale *= 64
    if scheme.reach < 0:  # the scales that are chosen for it have either sign
        scale *= torch.randint(2, scale.shape, generator=random) * 2 - 1
    stored = get_format(scheme.scale).encode(scale) if scheme.scale in FORMATS else scale.to(scheme.scale_dtype)
    zero = None
    if scheme.zero_point == "int":
        zero = torch.randint(1 << scheme.bits, scale.shape, dtype=torch.uint8, generator=random)
    elif scheme.zero_point == "float":
        zero = (torch.rand(scale.shape, generator=random) * fmt.max).to(scheme.scale_dtype)
    outer = torch.rand(lead, generator=random) / 64 if scheme.outer else None
    values = to_values(codes, scheme, Scales(stored, zero, outer), torch.float64)
    return Weight((pack(codes, scheme.bits), stored, zero, outer), values)


def make_x(m: int, k: int, dtype: torch.dtype, form: str) -> Tensor:
    """x [..., K] with m rows in all, in one of the ``FORMS``."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1000 * m + k)).to(dtype)
    if form == "batched":
        return x.reshape(m // 2, 2, 1, k) if m % 2 == 0 else x.reshape(1, m, k)
    if form == "strided":
        return torch.stack((x, x + 1), dim=-1)[..., 0]
    if form == "transposed":
        return x.t().contiguous().t()
    if form == "outlier":
        x[m // 2, k // 2] = 1000
    if form == "denormal":
        x *= torch.finfo(dtype).smallest_normal / 8
    return x


def make_bias(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.linspace(-3, 3, math.prod(shape)).reshape(shape).to(dtype)


def assert_within(y: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert y.shape == exact.shape
    error = (y.detach().cpu().double() - exact).abs()
    excess = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=torch.inf)
    worst = excess.max().item() if excess.numel() else 0.0
    assert worst <= 1, f"an error of {worst:.3g} times the bound (largest error {error.max().item():.3g})"


def assert_product(run: Run, y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
    """y = x @ w.T + bias as the contract of the row promises; ``dtype``: that of y where x is not what the row took."""
    dtype = dtype or x.dtype
    assert y.dtype == dtype
    x = x.double()
    shift = None if bias is None else bias.double().unsqueeze(-2) if bias.dim() > 1 else bias.double()
    exact = x @ w.mT if shift is None else x @ w.mT + shift
    assert_within(y, exact, linear_bound(run.row.contract, x, w, shift, exact, dtype))


# ---- matrix products -------------------------------------------------------------------------------------------


@pytest.mark.sampled(each="run")
@pytest.mark.parametrize(("run", "scheme", "case"), linear_cases("linear"))
def test_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    m, n, k, dtype = case["m"], case["n"], case["k"], case["dtype"]
    weight = make_weight(scheme, n, k)
    x = make_x(m, k, dtype, case["form"])
    bias = make_bias(dtype, n) if case["bias"] else None
    if bias is not None and case["form"] == "denormal":
        bias *= torch.finfo(dtype).smallest_normal
    y = run.do(case["by"], scheme, x, *weight.arranged(run.row.layout, scheme), bias)
    assert_product(run, y, x, weight.values, bias)


@pytest.mark.sampled(each="run")
@pytest.mark.parametrize(("run", "scheme", "case"), linear_cases("grouped_linear", ("plain", "outlier"), experts=(1, 3)))
def test_grouped_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    m, n, k, dtype, experts = case["m"], case["n"], case["k"], case["dtype"], case["experts"]
    weight = make_weight(scheme, experts, n, k)
    x = make_x(experts * m, k, dtype, case["form"]).reshape(experts, m, k)
    bias = make_bias(dtype, experts, n) if case["bias"] else None
    y = run.do(case["by"], scheme, x, *weight.arranged(run.row.layout, scheme), bias)
    assert_product(run, y, x, weight.values, bias)


@pytest.mark.sampled(each="run")
@pytest.mark.parametrize(("run", "scheme", "case"), linear_cases("experts_linear", FORMS[::2], experts=(1, 3, 9), share=(1, 2)))
def test_experts_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    """Rows choose experts unevenly, the last expert seldom, and some rows an index that is none."""
    n, k, dtype, experts = case["n"], case["k"], case["dtype"], case["experts"]
    rows = experts * case["m"]
    share = case["share"] if rows % case["share"] == 0 else 1
    weight = make_weight(scheme, experts, n, k)
    x = make_x(rows // share, k, dtype, case["form"]).reshape(-1, k)
    bias = make_bias(dtype, experts, n) if case["bias"] else None
    random = torch.Generator().manual_seed(rows + k)
    chosen = (torch.rand(rows, generator=random) ** 2 * (experts + 0.2)).long()
    y = run.do(case["by"], scheme, x, *weight.arranged(run.row.layout, scheme), bias, rest=(chosen,)).cpu()
    assert y.shape == (rows, n)
    for e in range(experts):
        of = (chosen == e).nonzero()[:, 0]
        assert_product(run, y[of], x[of // share], weight.values[e], None if bias is None else bias[e])
    assert not y[chosen == experts].any()


@pytest.mark.sampled(each="run")
@pytest.mark.parametrize(
    ("run", "scheme", "case"),
    linear_cases("quantized_linear", FORMS[:-1], activation=activations, static=(False, True)),
)
def test_quantized_linear(run: Run, scheme: Scheme, case: dict[str, Any]) -> None:
    m, n, k, dtype = case["m"], case["n"], case["k"], case["dtype"]
    activation = Scheme.parse(case["activation"])
    weight = make_weight(scheme, n, k)
    x = make_x(m, k, dtype, case["form"])
    bias = make_bias(dtype, n) if case["bias"] else None
    static = None
    if case["static"] and activation.scale in PLAIN_SCALES and activation.zero_point == "none":
        static = torch.tensor(4 / activation.fmt.max)
    wide = x.reshape(-1, k).float()
    if static is None:
        chosen = choose(wide, activation, "absmax")
    else:
        chosen = Scales(static.to(activation.scale_dtype).expand(wide.shape[0], activation.groups(k)))
    rounded = to_values(to_codes(wide, activation, chosen), activation, chosen, torch.float64).reshape(x.shape)
    y = run.do(case["by"], scheme, x, *weight.arranged(run.row.layout, scheme), bias, rest=(activation, static))
    assert_product(run, y, rounded, weight.values, bias, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", ["uint4:g32:zint:bf16", "int8:row:bf16", "fp4_e2m1:g32:e8m0"])
@pytest.mark.parametrize("shape", [(0, 50), (2, 0, 50)])
def test_no_rows(device: str, scheme: str, shape: tuple[int, ...]) -> None:
    weight = make_weight(Scheme.parse(scheme), 7, 50).on(device)
    for bias in (None, torch.ones(7, device=device)):
        y = torch.ops.lowbit.linear(torch.ones(shape, device=device), *weight, bias, scheme, "canonical")
        assert y.shape == (*shape[:-1], 7)


@pytest.mark.parametrize("run", [param for param in runs("linear") if param.values[0].row.layout in (None, "canonical")])
def test_strided_weight(run: Run) -> None:
    """A slice of rows, and one along K at a group's start, are views in the canonical layout (in no other): along K where groups
    divide a row and the codes lie in one plane."""
    row = run.row

    def first(found: tuple[str, str]) -> tuple[bool, bool, bool]:
        """Those that are sliced along K come first."""
        return found[1] != "none", FORMATS[found[0]].bits not in (1, 2, 4, 8), found[0] not in ("int4", "int8")

    size = next((size for size in (32, 128) if size in groups(row)), groups(row)[0])
    scheme = scheme_of(min(weights(row), key=first), size, "fp32" if "fp32" in scales(row) else scales(row)[0])
    unit = 32 if size == -1 else size
    weight = make_weight(scheme, 12, 6 * unit)
    skipped = 2 if size != -1 and scheme.bits in (1, 2, 4, 8) else 0
    packed, scale, zero, outer = weight.parts
    parts = (
        packed[1::2, packed.shape[1] * skipped // 6 :],
        scale[1::2, skipped:],
        None if zero is None else zero[1::2, skipped:],
        outer,
    )
    values = weight.values[1::2, skipped * unit :]
    dtype = next(dtype for dtype in DTYPES if row.dtypes is None or dtype in row.dtypes)
    x = make_x(max(row.m[0], 1) if row.m[1] is None else row.m[1], values.shape[-1], dtype, "plain")
    assert_product(run, run.do("row", scheme, x, *parts, None), x, values, None)


# ---- the other operators ---------------------------------------------------------------------------------------


@pytest.mark.sampled(each="run", count=2)
@pytest.mark.parametrize(("run", "dtype"), dtypes_of("dequantize", *DTYPES, torch.float64))
def test_dequantize(run: Run, dtype: torch.dtype) -> None:
    if run.row.dtypes is not None and dtype not in run.row.dtypes:
        return
    for case in pairwise({"weight": weights(run.row), "group": groups(run.row), "scale": scales(run.row), "k": ks(run.row)}):
        scheme = scheme_of(case["weight"], case["group"], case["scale"])
        weight = make_weight(scheme, rows_of(run.row, 5), case["k"])
        w = run.do("operator", scheme, *weight.arranged(run.row.layout, scheme), rest=(case["k"], dtype))
        assert w.dtype == dtype
        assert_within(w, weight.values, weight_bound(weight.values, dtype))


@pytest.mark.sampled(each="run")
@pytest.mark.parametrize(("run", "dtype"), dtypes_of("embedding", *DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 2)])
def test_embedding(run: Run, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    indices = torch.randint(9, shape, generator=torch.Generator().manual_seed(0))
    for case in pairwise({"weight": weights(run.row), "group": groups(run.row), "scale": scales(run.row), "k": ks(run.row)}):
        scheme = scheme_of(case["weight"], case["group"], case["scale"])
        weight = make_weight(scheme, rows_of(run.row, 9), case["k"])
        rows = run.do("operator", scheme, indices, *weight.arranged(run.row.layout, scheme), rest=(case["k"], dtype))
        assert rows.dtype == dtype
        exact = weight.values[indices]
        assert_within(rows, exact, weight_bound(exact, dtype))


@pytest.mark.parametrize("run", runs("quantize"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(run: Run, dtype: torch.dtype) -> None:
    """With the scales that the row chose, no code is nearer to the weight than the one it took."""
    for case in pairwise({"weight": weights(run.row), "group": groups(run.row), "scale": scales(run.row), "k": ks(run.row)}):
        scheme = scheme_of(case["weight"], case["group"], case["scale"])
        w = make_x(3, case["k"], dtype, "plain")
        packed, scale, zero, outer = (part.cpu() for part in run.do("operator", scheme, w, rest=("range",)))
        chosen = Scales(scale, zero if scheme.zero_point_dtype else None, outer if scheme.outer else None)
        codes = unpack(packed, scheme.bits, case["k"])
        took = to_values(codes, scheme, chosen, torch.float64)
        every = torch.tensor([code for _, code in scheme.fmt._grid], dtype=torch.uint8)
        could = to_values(every[:, None, None].expand(-1, *w.shape), scheme, chosen, torch.float64)
        least = (could - w.double()).abs().amin(0)
        slack = 2.0**-22 * (w.double().abs() + could.abs().amax(0))  # two fp32 roundings on the way to the grid
        assert bool(((took - w.double()).abs() <= least + slack).all()), scheme


def test_every_operator_with_a_row_is_tested() -> None:
    tested = {"linear", "grouped_linear", "experts_linear", "quantized_linear", "dequantize", "embedding", "quantize"}
    tested |= {"rms_norm_quantize", "codes_linear"}  # in test_fused_norm_quant.py
    assert {row.op for row in kernels()} == tested
