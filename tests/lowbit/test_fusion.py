"""Fused layers give what they gave apart, whatever they are called with, and look and save as before."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowbit import QLinear, fuse_, load, quantize_, save
from lowbit.evals.shapes import random_model
from lowbit_kernels.layouts import LAYOUTS
from tests.support import strategies  # noqa: F401 - its profile

SCHEMES = ("int4", "int3", "fp6", "nf4", "mxfp4", "int8_dynamic_activation_int8_weight")


class Attention(nn.Module):
    """Three layers that read one tensor, of different heights, and one that reads what comes of them."""

    def __init__(self, bias: bool = False, heights: tuple[int, ...] = (48, 16, 32)) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=bias) for n in heights)
        self.o = nn.Linear(sum(heights), 64, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat((self.q(x), self.k(x), self.v(x)), -1))


def made(scheme: str, bias: bool = False) -> Attention:
    torch.manual_seed(0)
    model = Attention(bias)
    quantize_(model, scheme)
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fused_model_gives_what_it_gave(scheme, bias):
    model, x = made(scheme, bias), torch.randn(5, 64)
    apart = model(x)
    assert fuse_(model, x) == [("q", "k", "v")]
    torch.testing.assert_close(model(x), apart, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x[:1]), apart[:1], rtol=1e-5, atol=1e-6)
    assert fuse_(model, x) == []  # they are fused already


@given(order=st.lists(st.tuples(st.sampled_from("qkv"), st.integers(0, 2)), max_size=12))
def test_layers_may_be_called_in_any_order(order):
    model, xs = made("int4"), [torch.randn(1 + i, 64) for i in range(3)]
    wanted = {(name, i): getattr(model, name)(xs[i]) for name in "qkv" for i in range(3)}
    fuse_(model, xs[0])
    for name, i in order:
        torch.testing.assert_close(getattr(model, name)(xs[i]), wanted[name, i], rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(heights=st.tuples(*[st.sampled_from([16, 32, 48, 64])] * 3), arranged=st.tuples(*[st.sampled_from([*LAYOUTS])] * 3))
def test_layers_of_any_layouts_are_fused_and_save_as_before(heights, arranged):
    model, x = Attention(heights=heights), torch.randn(3, 64)
    quantize_(model, "int4_g32")
    for layer, layout in zip((model.q, model.k, model.v), arranged, strict=True):
        layer.weight = layer.weight.to_layout(layout)
    layers = {name: getattr(model, name) for name in "qkv"}
    fits = {name: layer for name, layer in layers.items() if layer.out_features % LAYOUTS[layer.weight.byte_layout].rows == 0}
    taken = {layer.weight.byte_layout for layer in fits.values()}
    apart, before = model(x), {name: part.clone() for name, part in model.state_dict().items()}
    assert fuse_(model, x) == ([tuple(fits)] if len(fits) > 1 else [])
    torch.testing.assert_close(model(x), apart, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(before[name], part) for name, part in model.state_dict().items())
    if len(fits) > 1:
        assert {layer.weight.byte_layout for layer in fits.values()} == (taken if len(taken) == 1 else {"canonical"})


def test_a_tensor_that_changes_between_two_readers_is_two():
    class Changing(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            k = self.k(x)
            return self.o(torch.cat((q, k, self.v(x.mul_(2))), -1))

    torch.manual_seed(0)
    model = Changing()
    quantize_(model, "int4")
    assert fuse_(model, torch.randn(3, 64)) == [("q", "k")]


def test_a_fused_tensor_that_changed_is_multiplied_anew():
    model, x = made("int4"), torch.randn(3, 64)
    fuse_(model, x)
    with torch.no_grad():
        model.q(x)
        x.mul_(3)
        torch.testing.assert_close(model.k(x), nn.functional.linear(x, model.k.weight.dequantize()), rtol=1e-4, atol=1e-5)


def test_layers_of_other_schemes_stay_apart():
    torch.manual_seed(0)
    model = Attention()
    quantize_(model, {"q": "int4", "k": "int8", "v": "int4", "o": "int4"})
    assert fuse_(model, torch.randn(2, 64)) == [("q", "v")]
    torch.manual_seed(0)
    model = Attention()
    quantize_(model, "nvfp4")  # each has a scale as a whole
    assert fuse_(model, torch.randn(2, 64)) == []


def test_states_copies_and_files_are_those_of_layers_apart(tmp_path):
    model, x = made("int4", bias=True), torch.randn(2, 64)
    before, apart = {name: part.clone() for name, part in model.state_dict().items()}, model(x)
    fuse_(model, x)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    copied = copy.deepcopy(model)
    assert copied.q.fused is None
    assert torch.equal(copied(x), apart)
    save(model, tmp_path / "fused.safetensors")
    fresh = Attention(bias=True)
    assert torch.equal(load(tmp_path / "fused.safetensors", fresh)(x), apart)


def test_a_change_takes_a_group_apart():
    for change in (lambda m: m.double(), lambda m: setattr(m.k, "weight", m.k.weight), lambda m: setattr(m.v, "bias", None)):
        model, x = made("int4"), torch.randn(2, 64)
        apart = model(x)
        fuse_(model, x)
        assert isinstance(model.q, QLinear)
        assert model.q.fused is not None
        change(model)
        assert model.q.fused is model.k.fused is model.v.fused is None
        torch.testing.assert_close(model(x.to(model.q.weight.dtype)).float(), apart, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_model_is_one_graph_with_one_product_a_group():
    model, x = made("int4"), torch.randn(2, 64)
    fuse_(model, x)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
    assert sum("linear" in str(node.target) for node in graphs[0].graph.nodes) == 2
    torch._dynamo.reset()


def test_a_transformers_model():
    model, ids = random_model("tiny", torch.device("cpu"), torch.float32), torch.arange(6)[None]
    quantize_(model, "int4")
    apart = model(ids).logits
    found = fuse_(model, ids)
    assert [[name.rsplit(".", 1)[1] for name in group] for group in found] == [
        ["q_proj", "k_proj", "v_proj"],
        ["gate_proj", "up_proj"],
    ] * 2
    torch.testing.assert_close(model(ids).logits, apart, rtol=1e-4, atol=1e-5)
