"""QLinear and QEmbedding: torch modules in every respect, whose stored bytes no cast and no foreign state changes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit import QEmbedding, QLinear, QTensor, Scheme, quantize_
from lowbit_kernels import layouts
from tests.lowbit.test_tensor import FAMILIES, make

X = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))


def linear(scheme: Scheme | str = "int4", seed: int = 0, n: int = 6, k: int = 40) -> QLinear:
    return QLinear(make(scheme, n, k, seed=seed), nn.Parameter(torch.randn(n)))


def stored(module: nn.Module) -> dict[str, Tensor]:
    return module.weight._parts()


class Holder(nn.Module):
    """A module of somebody else's with a QTensor as an ordinary parameter."""

    def __init__(self, q: QTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(q, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Tied(nn.Module):
    def __init__(self, scheme: str = "int4") -> None:
        super().__init__()
        self.embed = QEmbedding(make(scheme, 6, 40))
        self.head = QLinear(make(scheme, 6, 40, seed=1))
        self.head.weight = self.embed.weight

    def tied(self) -> bool:
        return self.embed.weight is self.head.weight


# ---- forward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", FAMILIES, ids=str)
def test_forward_is_that_of_the_dequantized_weight(scheme: Scheme) -> None:
    module, embedding = linear(scheme), QEmbedding(make(scheme, 6, 40))
    assert isinstance(module, nn.Linear)
    assert isinstance(embedding, nn.Embedding)
    torch.testing.assert_close(module(X), F.linear(X, module.weight.dequantize(), module.bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module(X[0]), module(X)[0], rtol=1e-5, atol=1e-5)
    assert module(X[:0]).shape == (0, 6)
    index = torch.tensor([[5, 1], [1, 0]])
    assert torch.equal(embedding(index), F.embedding(index, embedding.weight.dequantize()))
    assert {name for name, _ in module.named_parameters()} == {"weight", "bias"}
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["bias"]


@pytest.mark.parametrize("activation", [None, Scheme("int8", scale="fp32")], ids=str)
def test_autocast_is_that_of_a_float_layer(activation: Scheme | None) -> None:
    module = QLinear(make("int8", 6, 40), nn.Parameter(torch.randn(6)), activation)
    plain = nn.Linear(40, 6)
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=kind):
            y = module(X)
            assert y.dtype == plain(X).dtype == F.linear(X, module.weight, module.bias).dtype == kind
        assert torch.equal(y, module.to(kind)(X.to(kind)))
        module.float()
    y.float().sum().backward()
    assert module.bias.grad is not None
    assert module.bias.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.double()(X.double()).dtype == plain.double()(X.double()).dtype == torch.float64
    assert module.to("meta")(X.to("meta").double()).shape == (3, 6)


def test_activation_scheme_and_input_scale() -> None:
    q = make("int8", 6, 40)
    step = torch.tensor(0.05)
    for activation, scale in ((Scheme.parse("int8"), None), (Scheme("int8", scale="fp32"), step), (Scheme("fp8_e4m3fn"), None)):
        module = QLinear(q, None, activation, scale)
        if scale is None:
            rounded = QTensor.quantize(X, activation, method="absmax").dequantize()
        else:
            rounded = (X / scale).round().clamp(-128, 127) * scale
        torch.testing.assert_close(module(X), F.linear(rounded, q.dequantize()), rtol=1e-4, atol=1e-4)
        assert f"activation={activation}" in repr(module)
        half = copy.deepcopy(module).half()
        assert half(X.half()).dtype == torch.float16
        assert scale is None or torch.equal(half.input_scale, scale)


def test_gradients_reach_x_and_the_bias() -> None:
    module = linear("nvfp4").double()
    x = X.double().requires_grad_()
    module(x).square().sum().backward()
    dense = nn.Linear(40, 6).double()
    dense.weight.data, dense.bias.data = module.weight.dequantize(), module.bias.data
    y = X.double().requires_grad_()
    dense(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(module.bias.grad, dense.bias.grad)
    module.zero_grad()
    torch.optim.SGD(module.parameters(), 0.1).step()


def test_what_goes_wrong_says_so() -> None:
    module = linear()
    for x in (X[:, :39], X[:, :0], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="x must end in 40 features, got shape"):
            module(x)
    with pytest.raises(TypeError, match="x must be float16"):
        module(X.int())
    with pytest.raises(TypeError, match="the weight of a QLinear is a QTensor, got Tensor"):
        QLinear(torch.randn(6, 40))
    for q in (make("int4", 6, 40).t(), make("int4", 2, 6, 40), make("int4", 6, 40)[0]):
        with pytest.raises(ValueError, match="a module's weight is a matrix"):
            QLinear(q)
    with pytest.raises(IndexError, match=r"embedding indices must be 0\.\.5, got -1\.\.2"):
        QEmbedding(make("int4", 6, 40))(torch.tensor([2, -1]))
    for value in (torch.randn(6, 40), nn.Parameter(torch.randn(6, 40))):
        with pytest.raises(TypeError, match="the weight of a QLinear is a QTensor, got"):
            module.weight = value
    with pytest.raises(ValueError, match=r"the weight of this QLinear is \(6, 40\), got \(6, 48\)"):
        module.weight = make("int4", 6, 48)


def test_another_weight() -> None:
    module, q = linear("int4"), make("nvfp4", 6, 40, seed=4)
    for value in (q, nn.Parameter(q, requires_grad=False)):
        module.weight = value
        assert torch.equal(module.weight, q)
        assert module.weight.zero_point is None
        assert module.weight is module.weight
        assert isinstance(module.weight, nn.Parameter)
        torch.testing.assert_close(module(X), F.linear(X, q.dequantize(), module.bias), rtol=1e-5, atol=1e-5)
    assert set(module.state_dict()) == {"weight", "bias"}
    assert "fp4_e2m1:g16" in repr(module)
    assert "in_features=40, out_features=6, bias=True" in repr(module)
    assert repr(QEmbedding(q)).startswith("QEmbedding(6, 40, fp4_e2m1:g16")


# ---- moves -----------------------------------------------------------------------------------------------------


@pytest.mark.works_with("torch", ".to(dtype), .half(), .float()")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", ["int4", "nvfp4", "uint4:g16:zfloat:fp32"])
def test_a_cast_changes_no_stored_byte(scheme: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(linear(scheme), nn.ReLU(), linear(scheme, n=40, k=6))
    before = copy.deepcopy(model)
    model.to(dtype)
    for module, old in ((model[0], before[0]), (model[2], before[2])):
        assert module.weight.dtype == module.bias.dtype == dtype
        for name, part in stored(module).items():
            assert part.dtype == getattr(old.weight, name).dtype
            assert torch.equal(part, getattr(old.weight, name))
    assert model(X.to(dtype)).dtype == dtype
    assert QEmbedding(make(scheme, 6, 40)).to(dtype)(torch.tensor([0])).dtype == dtype


@pytest.mark.works_with("torch", "share_memory_")
@pytest.mark.works_with("torch", "meta device, to_empty")
def test_devices_and_shared_memory() -> None:
    module = linear("nvfp4")
    meta = copy.deepcopy(module).to("meta")
    assert {part.device.type for part in meta.state_dict().values()} == {"meta"}
    assert meta.weight.device.type == "meta"
    empty = meta.to_empty(device="cpu")
    assert not empty.load_state_dict(module.state_dict()).missing_keys
    assert torch.equal(empty(X), module(X))
    assert all(part.is_shared() for part in stored(module.share_memory()).values())


@pytest.mark.works_with("torch", "deepcopy")
def test_deepcopy_and_ties() -> None:
    module = linear()
    other = copy.deepcopy(module)
    assert torch.equal(other(X), module(X))
    assert isinstance(other.weight, nn.Parameter)
    assert all(part.data_ptr() != getattr(module.weight, name).data_ptr() for name, part in stored(other).items())
    tied = Tied()
    assert tied.tied()
    assert len(list(tied.parameters())) == 1
    for model in (copy.deepcopy(tied), copy.deepcopy(tied).to(torch.float16), copy.deepcopy(tied).to("cpu", torch.float64)):
        assert model.tied()
        assert model.embed.weight is not tied.embed.weight
        assert torch.equal(model.embed.weight, tied.embed.weight)
    file = io.BytesIO()
    torch.save(tied, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert back.tied()
    assert torch.equal(back.head(X), tied.head(X))


# ---- states ----------------------------------------------------------------------------------------------------


@pytest.mark.works_with("torch", "load_state_dict(assign=)")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int3", "nvfp4"])
def test_state_dict(scheme: str, assign: bool) -> None:
    for make_module in (lambda seed: linear(scheme, seed), lambda seed: Holder(make(scheme, 6, 40, seed=seed))):
        source, target = make_module(0), make_module(1)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        assert torch.equal(target(X), source(X))
        assert torch.equal(target.weight, source.weight)
        assert all(isinstance(p, nn.Parameter) for p in target.parameters())


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (linear("int4"), linear("int4_sym"), r"quantized as int4:g128:bf16 \(6, 40\), and this module is uint4:g128:zint:bf16"),
        (linear("int4"), linear("int4", k=39), r"bf16 \(6, 39\), and this module is uint4:g128:zint:bf16 \(6, 40\)"),
        (
            Holder(make("int4", 6, 40)),
            Holder(make("int3", 6, 40)),
            "uint3:g128.*uint4:g128|uint4:g128.*uint3:g128",
        ),
        (linear("int4"), linear("int4", n=5), r"bf16 \(5, 40\), and this module is uint4:g128:zint:bf16 \(6, 40\)"),
        (linear("int4"), nn.Linear(40, 6), "is a Tensor of torch.float32 in the state, and this weight is quantized"),
    ],
    ids=["scheme", "K", "parameter scheme", "N", "float linear"],
)
def test_a_foreign_state_is_refused_before_anything_changes(mine: nn.Module, theirs: nn.Module, message: str) -> None:
    copied = mine.weight.clone()
    with pytest.raises((ValueError, RuntimeError), match=message):
        mine.load_state_dict(theirs.state_dict())
    assert torch.equal(mine.weight, copied)


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float64])
def test_a_qtensor_parameter_moves_with_its_module(cast: torch.dtype) -> None:
    module = Holder(make("nvfp4", 6, 40))
    before = copy.deepcopy(module)
    assert isinstance(before.weight, nn.Parameter)
    assert isinstance(before.weight, QTensor)
    module.to(cast)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.dtype == cast
    assert torch.equal(module.weight.packed, before.weight.packed)
    assert module(X.to(cast)).dtype == cast
    assert module.to("meta").weight.packed.device.type == "meta"
    assert module.to_empty(device="cpu").weight.packed.device.type == "cpu"
    assert module.share_memory().weight.is_shared()


def test_a_state_is_canonical_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(parts: layouts.Parts, scheme: Scheme, k: int) -> layouts.Parts:
        return layouts.Parts(*(None if part is None else part.flip(-2) for part in parts))

    monkeypatch.setitem(layouts.LAYOUTS, "upside-down", layouts.Layout("upside-down", turned, turned))
    plain, target = QLinear(make("int3", 6, 40)), QLinear(make("int3", 6, 40, seed=1).to_layout("upside-down"))
    target.load_state_dict(plain.state_dict())
    assert target.weight.byte_layout == "upside-down"
    assert torch.equal(target.weight.packed, plain.weight.canonical().packed.flip(0))
    assert torch.equal(target.state_dict()["weight"], plain.state_dict()["weight"])


@pytest.mark.parametrize("recipe", ["int4", "nf4", "int8_dynamic_activation_int8_weight"])
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 5, 40), (2, 3, 5, 40)])
def test_an_output_can_be_changed_in_place_as_that_of_a_float_layer(recipe, shape):
    model = nn.Sequential(nn.Linear(40, 24))
    quantize_(model, recipe)
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    y += 1
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(y.detach(), model(x.detach()) + 1)
