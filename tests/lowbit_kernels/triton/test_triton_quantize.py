"""Triton's rounding, in its interpreter here and compiled where there is a GPU: the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.formats import FORMATS
from lowbit.grid import Scales, to_codes
from lowbit.scales import choose
from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit_kernels import reference
from lowbit_kernels.registry import Call, kernels
from lowbit_kernels.triton.quantization import round_rows

ROW = next(
    row for row in kernels() if row.name == ("triton_quantize" if torch.cuda.is_available() else "triton_quantize_interpreted")
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(ROW.available() is not None, reason=str(ROW.available()))


def takes(scheme: Scheme) -> bool:
    return ROW.refusal(Call("quantize", DEVICE, 0, "canonical", scheme, torch.float32, 0, 8, 8)) is None


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    name = draw(st.sampled_from(sorted(FORMATS)))
    fmt = FORMATS[name]
    zero = draw(st.sampled_from(("int", "float"))) if fmt.min == 0 and fmt.step == 1 else "none"
    scale = draw(st.sampled_from((*PLAIN_SCALES, "e8m0", "fp8_e4m3fn", "fp8_e5m2")))
    if zero == "float" and scale not in PLAIN_SCALES:
        scale = "bf16"
    outer = zero != "float" and scale.startswith("fp8") and draw(st.booleans())
    try:
        scheme = Scheme(name, draw(st.sampled_from((-1, 8, 16, 24, 32, 48, 128))), zero, scale, outer)
    except ValueError:
        scheme = Scheme("int4", 32)
    return scheme if takes(scheme) else Scheme("int4", 32)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Numbers as they are met, halfway between codes, of both zeros, and next to the ends of float32's range."""
    lead = draw(st.sampled_from(((), (1,), (2,))))
    n, k = draw(st.integers(1, 5)), draw(st.sampled_from((1, 7, 8, 50, 64, 130, 257)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    w = torch.randn(*lead, n, k, generator=random)
    form = draw(st.sampled_from(("plain", "ties", "large", "small", "zeros", "one sign")))
    if form == "ties":
        w = (w * 16).round() / draw(st.sampled_from((2.0, 4.0, 16.0)))
    if form == "one sign":
        w = w.abs()
    if form == "large":
        w *= 1e30
    if form == "small":
        w *= 1e-39
    if form == "zeros":
        w = torch.where(w > 0.5, w, torch.where(w > 0, 0.0, -0.0))
        w[..., 0, :] = 0
    return w.to(draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))).nan_to_num(
        nan=0.0, posinf=1.0, neginf=-1.0
    )


def outcome(run, w: Tensor, scheme: Scheme, method: str = "range") -> list[Tensor | None] | str:
    try:
        return [None if part is None else part.cpu() for part in run(w, scheme, method)]
    except ValueError as error:
        return str(error)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    whole = a.shape == b.shape and a.dtype == b.dtype
    return whole and bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


@settings(max_examples=60, deadline=None)
@given(schemes(), weights(), st.sampled_from(("range", "range", "absmax")))
def test_bytes_are_those_of_the_reference(scheme: Scheme, w: Tensor, method: str) -> None:
    found, wanted = outcome(ROW.run, w.to(DEVICE), scheme, method), outcome(reference.quantize, w, scheme, method)
    if isinstance(found, str) or isinstance(wanted, str):
        assert found == wanted
        return
    for name, a, b in zip(("packed", "scale", "zero_point", "outer"), found, wanted, strict=True):
        assert same(a, b), (name, a, b)


@pytest.mark.parametrize("scheme_str", ["int4:g8:bf16", "uint4:g8:zint:fp16", "fp4_e2m1:g16:fp8_e4m3fn:outer"])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf"), 1e38])
def test_a_weight_that_the_reference_refuses_is_refused_alike(scheme_str: str, value: float) -> None:
    w = torch.linspace(-1, 1, 64).reshape(2, 32)
    w[1, 3] = value
    scheme = Scheme.parse(scheme_str)
    found, wanted = outcome(ROW.run, w.to(DEVICE), scheme), outcome(reference.quantize, w, scheme)
    assert found == wanted if isinstance(wanted, str) else all(same(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("activation", ["int8:row:fp32", "fp8_e4m3fn:row:fp32"])
@pytest.mark.parametrize("fixed", [None, 0.0, 0.03, 1e-37])
def test_tokens_are_rounded_as_the_reference_rounds_them(activation: str, fixed: float | None) -> None:
    """With a scale a token, or one for all, for rows longer than a block too."""
    scheme = Scheme.parse(activation)
    x = torch.randn(3, 17000, generator=torch.Generator().manual_seed(0))
    x[1] *= 0
    given = None if fixed is None else torch.tensor(fixed)
    chosen = choose(x, scheme, "absmax") if given is None else Scales(given.expand(3, 1))
    codes, scale = round_rows(x.to(DEVICE), scheme, None if given is None else given.to(DEVICE))
    assert torch.equal(codes.cpu(), to_codes(x, scheme, chosen))
    assert torch.equal(scale.cpu().expand(3), chosen.scale[:, 0])
