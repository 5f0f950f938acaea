"""What torch demands of the operators: schema, fake, autograd and tracing with dynamic shapes; and their own checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.scheme import Scheme

SCHEMES = (
    "uint4:g32:zint:bf16",
    "int8:row:bf16",
    "uint3:g64:zint:bf16",
    "fp4_e2m1:g32:e8m0",
    "fp4_e2m1:g16:fp8_e4m3fn:outer",
    "uint4:g32:zfloat:fp16",
)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
ops: Any = torch.ops.lowbit


def weight(scheme: str, device: str, *shape: int) -> tuple[Tensor | None, ...]:
    """The four parts of a quantized weight, None for each that the scheme lacks."""
    how = Scheme.parse(scheme)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    packed, scale, zero, outer = ops.quantize(w, scheme, "range")
    return packed, scale, zero if how.zero_point_dtype else None, outer if how.outer else None


def check(op: Any, *args: Any) -> None:
    """Schema, autograd registration, fake tensors, and ahead-of-time tracing with dynamic shapes."""
    results = torch.library.opcheck(op, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(3, 80), (2, 3, 80), (80,)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(device: str, scheme: str, shape: tuple[int, ...], bias: bool) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    b = torch.randn(24, device=device, requires_grad=True) if bias else None
    check(ops.linear.default, x, *weight(scheme, device, 24, 80), b, scheme, "canonical")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ["int8:row:fp32", "fp8_e4m3fn:g32:e8m0"])
def test_quantized_linear(device: str, scheme: str, activation: str) -> None:
    x = torch.randn(2, 3, 80, device=device, requires_grad=True)
    b = torch.randn(24, device=device, requires_grad=True)
    static = None if activation.endswith("e8m0") else torch.tensor(0.02, device=device)
    check(ops.quantized_linear.default, x, *weight(scheme, device, 24, 80), b, scheme, "canonical", activation, static)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_grouped_linear(device: str, scheme: str) -> None:
    x = torch.randn(2, 3, 80, device=device, requires_grad=True)
    b = torch.randn(2, 24, device=device, requires_grad=True)
    check(ops.grouped_linear.default, x, *weight(scheme, device, 2, 24, 80), b, scheme, "canonical")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_embedding(device: str, scheme: str) -> None:
    indices = torch.tensor([[0, 5], [23, 5]], device=device)
    check(ops.embedding.default, indices, *weight(scheme, device, 24, 80), scheme, "canonical", 80, torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(24, 80), (2, 24, 80)])
def test_dequantize(device: str, scheme: str, shape: tuple[int, ...]) -> None:
    check(ops.dequantize.default, *weight(scheme, device, *shape), scheme, "canonical", 80, torch.float16)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(24, 80), (2, 24, 80)])
def test_quantize(device: str, scheme: str, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, device=device)
    check(ops.quantize.default, w, scheme, "range")


# ---- gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_dequantized_weight(scheme: str) -> None:
    parts = weight(scheme, "cpu", 24, 80)
    w = ops.dequantize(*parts, scheme, "canonical", 80, torch.float64)
    x = torch.randn(2, 3, 80, dtype=torch.float64, requires_grad=True)
    b = torch.randn(24, dtype=torch.float64, requires_grad=True)
    got = torch.autograd.grad(ops.linear(x, *parts, b, scheme, "canonical").square().sum(), (x, b))
    want = torch.autograd.grad(torch.nn.functional.linear(x, w, b).square().sum(), (x, b))
    torch.testing.assert_close(got, want)


def test_a_scale_that_asks_for_a_gradient_is_told() -> None:
    packed, scale, _, _ = weight("int8:row:bf16", "cpu", 24, 80)
    assert scale is not None
    y = ops.linear(torch.randn(1, 80), packed, scale.requires_grad_(), None, None, None, "int8:row:bf16", "canonical")
    with pytest.raises(RuntimeError, match=r"requires_grad_\(False\)"):
        y.sum().backward()


# ---- what the operators refuse ---------------------------------------------------------------------------------


def test_errors_name_what_was_passed() -> None:
    scheme = "uint4:g32:zint:bf16"
    packed, scale, zero, outer = weight(scheme, "cpu", 24, 80)
    assert packed is not None
    assert scale is not None
    x = torch.randn(3, 80)

    def linear(
        x: Any = x, packed: Any = packed, scale: Any = scale, zero: Any = zero, outer: Any = outer, bias: Any = None
    ) -> None:
        ops.linear(x, packed, scale, zero, outer, bias, scheme, "canonical")

    linear()
    for change, error, words in (
        ({"x": torch.randn(3, 90)}, ValueError, "K=90.*rows of 45 bytes"),
        ({"x": torch.ones(3, 80, dtype=torch.int32)}, TypeError, "torch.int32"),
        ({"packed": packed.to(torch.int8)}, ValueError, "torch.int8"),
        ({"scale": scale.float()}, ValueError, "scale of a .*torch.float32"),
        ({"scale": scale[:, :2]}, ValueError, r"\(24, 2\)"),
        ({"zero": None}, ValueError, "has a zero_point"),
        ({"outer": torch.ones(())}, ValueError, "has no outer scale"),
        ({"bias": torch.ones(23)}, ValueError, r"shape \(24,\), got \(23,\)"),
    ):
        with pytest.raises(error, match=words):
            linear(**change)


def test_an_index_beyond_the_table_is_named() -> None:
    parts = weight("int8:row:bf16", "cpu", 24, 80)
    with pytest.raises(IndexError, match=r"0\.\.23, got 0\.\.24"):
        ops.embedding(torch.tensor([0, 24]), *parts, "int8:row:bf16", "canonical", 80, torch.float32)
