"""RMSNorm that ends in rounded tokens, and products that begin with them: every row against float64 of the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import QTensor, Scheme, quantize_
from lowbit.formats import get_format
from lowbit.grid import Scales, to_values
from lowbit.packing import pack
from lowbit_kernels.registry import kernels, strict
from tests.support.accuracy import gamma, linear_bound

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ACTIVATIONS = ("int8:row:fp32", "fp8_e4m3fn:row:fp32")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROUNDING = 2.0**-24
LEAST = 2.0**-118  # of what a token's largest number counts as


def rows_of(op: str) -> list[Any]:
    """The rows of an operator that run here; those that a GPU runs are named on one alone."""
    found = [row for row in kernels() if row.op == op and (row.devices is None or DEVICE in row.devices)]
    return [pytest.param(row, id=row.name) for row in found if row.available() is None]


def exact_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x times the weight, and what both are divided by."""
    x = x.double()
    return x if weight is None else x * weight.double(), (x.square().mean(-1, keepdim=True) + eps).sqrt()


def assert_nearest(codes: Tensor, scale: Tensor, x: Tensor, weight: Tensor | None, eps: float, activation: Scheme) -> None:
    """The scale is that of the largest number, and no code is nearer to a number than the one that it has.

    The sum of squares passes K roundings, of which the root halves the error, and the scale five more; a number over the
    scale passes at most six: those of its product with the weight, of the largest's, and of the norm and the division.
    """
    k = x.shape[-1]
    numbers, root = exact_norm(x, weight, eps)
    largest = numbers.abs().amax(-1, keepdim=True)
    held = torch.where((largest > 0) & (largest < LEAST), LEAST, largest)
    wanted = held / root / activation.fmt.symmetric_max
    at_least = largest / root / activation.fmt.symmetric_max
    slack = gamma(k + 10, ROUNDING)
    assert ((scale >= at_least * (1 - slack) - 2.0**-149) & (scale <= wanted * (1 + slack) + 2.0**-149)).all()
    normed = numbers / root
    every = torch.tensor([code for _, code in activation.fmt._grid], dtype=torch.uint8)
    values = activation.fmt.decode(every, torch.float64)
    took = activation.fmt.decode(codes, torch.float64) * scale
    distance = (values * scale[..., None] - normed[..., None]).abs().amin(-1)
    # In quotients: what the number and the scale were off by, and twice 2**-150 where a product was subnormal.
    off = slack * (normed.abs() + took.abs()) + 2.0**-149 * (1 + 1 / root)
    assert ((took - normed).abs() <= distance + off).all()


@pytest.mark.parametrize("row", rows_of("rms_norm_quantize"))
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(ACTIVATIONS), st.sampled_from(DTYPES), st.sampled_from(((1,), (3,), (2, 1, 2), (0,))),
    st.sampled_from((1, 7, 8, 50, 64, 130, 257, 1024)), st.sampled_from(("plain", "outlier", "small", "tiny", "zeros", "large")),
    st.booleans(), st.booleans(), st.sampled_from((1e-6, 1e-5, 1.0)), st.integers(0, 2**32),
)  # fmt: skip
def test_tokens_are_normed_and_rounded_to_the_nearest_codes(row, scheme_str, dtype, lead, k, form, weighted, strided, eps, seed):
    activation, random = Scheme.parse(scheme_str), torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, 2 * k, generator=random)[..., :k] if strided else torch.randn(*lead, k, generator=random)
    weight = (torch.rand(k, generator=random) * 2 - 0.5).to(dtype) if weighted else None
    if form == "outlier":
        x[..., k // 2] = 1000
    if form == "small":
        x *= 1e-6
    if form == "tiny" and dtype != torch.float16:
        x *= 1e-37
    if form == "zeros":
        x[:1] = 0
    if form == "large":
        x *= 1e4
    x = x.to(dtype)
    if lead == (0,) and row.m[0]:
        return
    given = None if weight is None else weight.to(DEVICE)
    codes, scale = (part.cpu() for part in row.run(x.to(DEVICE), given, eps, activation))
    assert codes.shape == x.shape
    assert scale.shape == (*lead, 1)
    assert_nearest(codes, scale.double(), x, weight, eps, activation)


@pytest.mark.parametrize("row", rows_of("rms_norm_quantize"))
@pytest.mark.parametrize("scheme_str", ACTIVATIONS)
def test_a_token_that_is_not_finite_spoils_itself_alone(row, scheme_str):
    x = torch.linspace(-1, 1, 192).reshape(3, 64)
    x[1, 5] = float("nan")
    _, scale = row.run(x.to(DEVICE), None, 1e-6, Scheme.parse(scheme_str))
    assert torch.isfinite(scale.cpu()[:, 0]).tolist() == [True, False, True]


@pytest.mark.parametrize("row", rows_of("rms_norm_quantize"))
def test_a_token_of_zeros_has_scale_zero(row):
    codes, scale = row.run(torch.zeros(2, 48).to(DEVICE), None, 1e-6, Scheme.parse(ACTIVATIONS[0]))
    assert not codes.any()
    assert not scale.any()


def tokens(lead: tuple[int, ...], k: int, activation: Scheme, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and their meaning."""
    fmt = get_format(activation.format)
    finite = torch.tensor([code for _, code in fmt._grid], dtype=torch.uint8)
    codes = finite[torch.randint(len(finite), (*lead, k), generator=random)]
    scale = torch.rand(*lead, 1, generator=random) / fmt.max
    return codes, scale, to_values(codes, activation, Scales(scale), torch.float64)


@pytest.mark.parametrize("row", rows_of("codes_linear"))
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(("int8", "fp8_e4m3fn")), st.sampled_from(("bf16", "fp16", "fp32")), st.sampled_from(DTYPES),
    st.sampled_from(((1,), (5,), (2, 3), (17,))), st.integers(1, 40), st.sampled_from((8, 50, 256, 300)), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
def test_products_of_rounded_tokens(row, name, kept, dtype, lead, n, k, biased, seed):
    scheme, activation = Scheme.parse(f"{name}:row:{kept}"), Scheme.parse(f"{name}:row:fp32")
    if row.formats is not None and name not in row.formats:
        return
    random = torch.Generator().manual_seed(seed)
    codes, x_scale, x = tokens(lead, k, activation, random)
    rows, scale, _ = tokens((n,), k, scheme, random)
    scale = scale.to(scheme.scale_dtype)
    weight = pack(rows, 8), scale, None, None
    w = to_values(rows, scheme, Scales(scale), torch.float64)
    bias = torch.linspace(-3, 3, n).to(dtype) if biased else None
    there = [None if part is None else part.to(DEVICE) for part in (codes, x_scale, *weight, bias)]
    with strict(row.name):
        y = torch.ops.lowbit.codes_linear(*there, str(scheme), "canonical", str(activation), k, dtype).cpu()
    assert y.dtype == dtype
    shift = None if bias is None else bias.double()
    exact = x @ w.T + (0 if shift is None else shift)
    assert ((y.double() - exact).abs() <= linear_bound(row.contract, x, w, shift, exact, dtype)).all()


# ---- what a user calls ----------------------------------------------------------------------------------------------


def layers(recipe: str = "int8_dynamic_activation_int8_weight", k: int = 64) -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(k, n) for n in (48, 16)])
    quantize_(model, recipe)
    return model.to(DEVICE)


@pytest.mark.parametrize("recipe", ["int8_dynamic_activation_int8_weight", "int8_dynamic_activation_int4_weight"])
def test_layers_multiply_what_was_rounded_once(recipe):
    model, x = layers(recipe), torch.randn(2, 3, 64, device=DEVICE)
    rounded = lowbit.quantized_rms_norm(x, torch.linspace(0.5, 2, 64, device=DEVICE), 1e-6, model[0].activation)
    assert isinstance(rounded, QTensor)
    assert rounded.shape == x.shape
    with lowbit.trace_kernels() as trace:
        for layer in model:
            y = layer(rounded)
            wanted = nn.functional.linear(rounded.dequantize(), layer.weight.dequantize(), layer.bias)
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
            y.sum().backward()
            torch.testing.assert_close(layer.bias.grad, torch.full_like(layer.bias, 6.0))
    assert {(row.op, row.m, row.layout) for row in trace.counts if row.op != "dequantize"} == {
        ("codes_linear", 6, model[0].weight.byte_layout)
    }


def test_a_layer_refuses_what_is_rounded_to_something_else():
    layer = layers()[0]
    x = torch.randn(3, 64, device=DEVICE)
    for scheme_str in ("fp8_e4m3fn:row:fp32", "int8:g32:fp32"):
        with pytest.raises(ValueError, match=r"x is rounded to .* already: give it x.dequantize"):
            layer(lowbit.quantized_rms_norm(x, None, 1e-6, scheme_str))
    rounded = lowbit.quantized_rms_norm(x, None, 1e-6, layer.activation)
    with pytest.raises(ValueError, match="must end in 64 features"):
        layer(lowbit.quantized_rms_norm(x[:, :32], None, 1e-6, layer.activation))
    layer.input_scale = torch.tensor(0.1, device=DEVICE)
    with pytest.raises(ValueError, match="has a fixed input_scale, and x is rounded"):
        layer(rounded)
    weight_only = layers("int8")[0]
    with pytest.raises(ValueError, match="activation None, and x is rounded"):
        weight_only(rounded)


@pytest.mark.parametrize(("change", "message"), [
    ({"eps": 0.0}, "eps must be above 0"),
    ({"weight": torch.ones(63)}, r"the norm's weight must be \[64\]"),
    ({"activation": "uint8:row:zint:fp32"}, "without zero points"),
    ({"x": torch.ones(2, 64, dtype=torch.int32)}, "x must be a floating point tensor"),
])  # fmt: skip
def test_what_cannot_be_normed_is_refused(change, message):
    call = {"x": torch.ones(2, 64), "weight": torch.ones(64), "eps": 1e-6, "activation": "int8:row:fp32"} | change
    with pytest.raises(ValueError, match=message):
        lowbit.quantized_rms_norm(*call.values())


def test_a_compiler_sees_two_operators_and_shapes_are_theirs():
    model, x = layers(), torch.randn(2, 3, 64, device=DEVICE)

    def both(x: Tensor) -> Tensor:
        rounded = lowbit.quantized_rms_norm(x, None, 1e-6, model[0].activation)
        return torch.cat([layer(rounded) for layer in model], -1)

    with torch.no_grad():
        assert torch.equal(torch.compile(both, backend="aot_eager", fullgraph=True)(x), both(x))
    for scheme_str in (*ACTIVATIONS, "int8:g32:bf16", "int4:row:fp32"):
        torch.library.opcheck(torch.ops.lowbit.rms_norm_quantize, (x, None, 1e-6, scheme_str), test_utils="test_faketensor")


def test_fused_layers_take_rounded_tokens(monkeypatch):
    monkeypatch.setattr("lowbit.fused._EAGER", {DEVICE})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([layer(x) for layer in self.layers], -1)

    model, x = Model(), torch.randn(3, 64, device=DEVICE)
    rounded = lowbit.quantized_rms_norm(x, None, 1e-6, model.layers[0].activation)
    apart = model(rounded)
    assert lowbit.fuse_(model, x) == [("layers.0", "layers.1")]
    with torch.no_grad(), lowbit.trace_kernels() as trace:
        torch.testing.assert_close(model(rounded), apart.detach())
    assert [(row.op, row.n) for row in trace.counts] == [("codes_linear", 64)]


@pytest.mark.gpu
def test_a_graph_replays_a_norm_and_its_layers():
    model, x = layers(k=4096), torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    model = model.bfloat16()

    def run() -> Tensor:
        rounded = lowbit.quantized_rms_norm(x, None, 1e-6, model[0].activation)
        return torch.cat([layer(rounded) for layer in model], -1)

    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, run())
