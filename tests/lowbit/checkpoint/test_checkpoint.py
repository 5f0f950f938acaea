"""What is saved comes back: every scheme, every kind of layer, tied and shared tensors, transformers models bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit
from lowbit import CheckpointError, QEmbedding, QLinear, QTensor, Scheme
from tests.support import models, strategies


def quantized(module: nn.Linear, scheme: str = "int4", **options: object) -> QLinear:
    return QLinear(QTensor.quantize(module.weight, scheme), module.bias, **options)


def same(a: nn.Module, b: nn.Module) -> None:
    """Two models of the same classes, tensors, dtypes and ties."""
    left, right = (dict(m.named_modules(remove_duplicate=False)) for m in (a, b))
    assert [(n, type(m)) for n, m in left.items()] == [(n, type(m)) for n, m in right.items()]
    ours, theirs = (dict([*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)]) for m in (a, b))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
        for other, its in ours.items():
            assert (tensor is its) == (theirs[name] is theirs[other]), (name, other)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(
    scheme=strategies.schemes(),
    n=st.integers(0, 5),
    k=st.integers(0, 70),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    kind=st.sampled_from(("linear", "embedding", "parameter")),
)
@settings(max_examples=100)
def test_every_scheme_and_shape_comes_back(tmp_path_factory, scheme, n, k, dtype, kind):
    folder = tmp_path_factory.mktemp("any")
    lead = (2,) if kind == "parameter" else ()
    values = torch.linspace(-1, 1, max(n * k, 1)).repeat(3)[: 2 * n * k] if lead else torch.linspace(-1, 1, n * k)
    q = QTensor.quantize(values.reshape(*lead, n, k).to(dtype), scheme)
    model, fresh = nn.Module(), nn.Module()
    if kind == "parameter":
        model.x, fresh.x = nn.Parameter(q, requires_grad=False), nn.Parameter(torch.empty(2, n, k, device="meta"))
    elif kind == "embedding":
        model.x, fresh.x = QEmbedding(q), nn.Embedding(n, k, device="meta", padding_idx=0 if n else None)
    else:
        model.x, fresh.x = QLinear(q), nn.Module()
        fresh.x = nn.Linear(1, 1, bias=False, device="meta")
        fresh.x.weight, fresh.x.in_features, fresh.x.out_features = nn.Parameter(torch.empty(n, k, device="meta")), k, n
    lowbit.save(model, folder)
    x = lowbit.load(folder, model=fresh).x
    found = x if kind == "parameter" else x.weight
    assert found.scheme == scheme
    assert found.dtype == dtype
    assert tuple(found.shape) == tuple(q.shape)
    for name, part in q._parts().items():
        assert torch.equal(getattr(found, name), part), name


def test_a_layer_of_each_kind(tmp_path):
    torch.manual_seed(0)
    activation = Scheme("int8", -1, scale="fp32")
    model = nn.Sequential(
        QEmbedding(QTensor.quantize(torch.randn(7, 40), "nf4"), padding_idx=2),
        quantized(nn.Linear(40, 9), activation=activation, input_scale=torch.tensor(0.25)),
        quantized(nn.Linear(9, 9, bias=False), "mxfp4", activation=activation),
        nn.BatchNorm1d(3),
        nn.Linear(9, 5).to(torch.float16),
    )
    model[1].bias.requires_grad_(False)
    lowbit.save(model, tmp_path)
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Embedding(7, 40, 2), nn.Linear(40, 9), nn.Linear(9, 9), nn.BatchNorm1d(3), nn.Linear(9, 5))
    loaded = lowbit.load(tmp_path, model=fresh)
    assert loaded is fresh
    same(model, loaded)
    assert not loaded.training
    assert loaded[0].padding_idx == 2
    assert loaded[1].activation == loaded[2].activation == activation
    assert loaded[2].input_scale is None
    assert loaded[4].weight.dtype == torch.float16
    assert loaded[4].weight.requires_grad


def test_tied_and_shared_tensors_are_stored_once_and_are_one_again(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
            self.first, self.view = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
            self.block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
            self.again, self.blocks = self.first, nn.ModuleList([self.block, self.block])

    model = Tied()
    model.embedding = QEmbedding(QTensor.quantize(model.embedding.weight, "int4_g32"))
    model.head = QLinear(model.embedding.weight)
    model.first = model.again = quantized(model.first)
    model.block[0] = quantized(model.block[0], "int3")
    model.view.weight = nn.Parameter(model.block[1].weight.data.expand(16, 16))  # not the same tensor as the norm's
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path, model=Tied())
    same(model, loaded)
    assert loaded.again is loaded.first
    assert loaded.blocks[1][0] is loaded.block[0]
    assert loaded.head.weight is loaded.embedding.weight
    separate = Tied()
    separate.again = nn.Linear(16, 16)
    assert lowbit.load(tmp_path, model=separate).again.weight is separate.first.weight
    # Separate parameters over one storage are found to be one as well.
    weight = model.embedding.weight
    parts = (part.detach() for part in (weight.packed, weight.scale, weight.zero_point))
    model.head = QLinear(QTensor(*parts, None, weight.scheme, (30, 16)))
    lowbit.save(model, tmp_path / "views")
    assert (tmp_path / "views/model.safetensors").stat().st_size == (tmp_path / "model.safetensors").stat().st_size


def test_a_model_that_shares_what_the_file_holds_apart_is_refused(tmp_path):
    lowbit.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path)
    layer = nn.Linear(4, 4)
    with pytest.raises(CheckpointError, match=r"1\.weight is the same tensor as 0\.weight in the model, and the file holds two"):
        lowbit.load(tmp_path, model=nn.Sequential(layer, layer))
    parts = [quantized(nn.Linear(4, 4)) for _ in range(2)]
    lowbit.save(nn.Sequential(*parts), tmp_path)
    same(nn.Sequential(*parts), lowbit.load(tmp_path, model=nn.Sequential(layer, layer)))


def test_the_model_itself_may_be_the_layer(tmp_path):
    model = quantized(nn.Linear(20, 3))
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path, model=nn.Linear(20, 3))
    assert torch.equal(loaded.weight.dequantize(), model.weight.dequantize())


def test_another_byte_layout_is_saved_canonical(tmp_path, monkeypatch):
    from lowbit_kernels.layouts import LAYOUTS, Layout, Parts

    def turned(parts, scheme, k):
        return Parts(parts.packed.flip(0), parts.scale.flip(0), parts.zero_point.flip(0))

    monkeypatch.setitem(LAYOUTS, "turned", Layout("turned", turned, turned))
    model = nn.Sequential(quantized(nn.Linear(20, 3)))
    lowbit.save(model, tmp_path / "a")
    model[0].weight = model[0].weight.to_layout("turned")
    lowbit.save(model, tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_plain_attributes_of_a_model_on_the_meta_device(tmp_path):
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.kept = self.table

    model = Module()
    model.table.mul_(3)
    lowbit.save(model, tmp_path)
    with torch.device("meta"):
        fresh, odd = Module(), Module()
    lowbit.load(tmp_path, model=fresh)
    assert fresh.kept is fresh.table
    assert torch.equal(fresh.table, torch.arange(4.0) * 3)
    assert torch.equal(lowbit.load(tmp_path, model=Module()).table, torch.arange(4.0))  # one with numbers keeps its own
    odd.plain = torch.empty(3, device="meta")
    with pytest.raises(CheckpointError, match="plain is a plain tensor on the meta device"):
        lowbit.load(tmp_path, model=odd)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "absent layer", "other layer", "dtype"])
def test_a_model_that_does_not_fit_is_left_as_it_was(tmp_path, change):
    saved = nn.Sequential(quantized(nn.Linear(40, 9)), nn.Linear(9, 9), nn.LayerNorm(9), nn.BatchNorm1d(9))
    model = nn.Sequential(nn.Linear(40, 9), nn.Linear(9, 9), nn.LayerNorm(9), nn.BatchNorm1d(9))
    if change == "missing":
        model.append(nn.Linear(9, 2))
        message = r"missing from the file: 4\.weight, 4\.bias"
    elif change == "unexpected":
        saved.append(nn.Linear(9, 2))
        message = r"unexpected, the model has none of that name: 4\.bias, 4\.weight"
    elif change == "shape":
        model[2] = nn.LayerNorm(8)
        message = r"2\.weight is float32 \[9\] in the file, expected float32 \[8\]"
    elif change == "absent layer":
        model[0] = nn.Identity()
        message = r"0 is a quantized linear in the file and a Identity in the model"
    elif change == "other layer":
        model[0] = nn.Linear(41, 9)
        message = r"0 is \[N, K\] = \[9, 40\] in the file and \[9, 41\] in the model"
    else:
        saved[3].running_mean = torch.zeros(9, dtype=torch.int64)
        message = r"3\.running_mean is int64 \[9\] in the file, expected float32 \[9\]"
    lowbit.save(saved, tmp_path)
    before, state = list(model.modules()), {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        lowbit.load(tmp_path, model=model)
    assert "model.safetensors" in str(caught.value)
    assert all(a is b for a, b in zip(before, model.modules(), strict=True))
    assert model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("limit", [1 << 40, 20_000])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformers_model_gives_the_same_logits(tmp_path, limit, tied, dtype):
    model = models.llama(tied, dtype)  # .to(bfloat16) rounds the rotary frequencies too, which no state_dict holds
    model.generation_config.top_k = 7  # transformers refuses to save this without do_sample; published models have it
    lowbit.quantize_(model, {"lm_head": None, "*": "int3"} if not tied else "int3")
    if tied:
        model.model.embed_tokens = QEmbedding(QTensor.quantize(model.model.embed_tokens.weight, "int8"))
        model.lm_head = QLinear(model.model.embed_tokens.weight)
    lowbit.save(model, tmp_path, max_shard_bytes=limit)
    loaded = lowbit.load(tmp_path)
    assert type(loaded) is type(model)
    same(model, loaded)
    tokens = models.tokens()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.generation_config.top_k == 7
    assert loaded.config.dtype == dtype
    assert ("model.safetensors.index.json" in files(tmp_path)) == (limit == 20_000)
    for path in tmp_path.glob("*.json"):
        assert str(tmp_path) not in path.read_text()
    lowbit.save(loaded, tmp_path / "again", max_shard_bytes=limit)
    for name in files(tmp_path / "again"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_conv1d_becomes_a_linear_layer(tmp_path):
    model = models.gpt2()
    lowbit.quantize_(model, "int4_g32")
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path)
    assert isinstance(loaded.transformer.h[0].attn.c_attn, QLinear)
    same(model, loaded)
    assert torch.equal(loaded(models.tokens()).logits, model(models.tokens()).logits)
    same(model, lowbit.load(tmp_path, model=models.gpt2()))


def test_other_programs_read_a_float_model_and_see_what_quantized_another(tmp_path):
    from transformers import AutoModelForCausalLM

    model = models.llama()
    lowbit.save(model, tmp_path / "float")
    same(model, lowbit.load(tmp_path / "float"))
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    assert torch.equal(there(models.tokens()).logits, model(models.tokens()).logits)
    lowbit.quantize_(model, "int8")
    lowbit.save(model, tmp_path / "int8")
    config = json.loads((tmp_path / "int8/config.json").read_text())
    assert config["quantization_config"].items() >= {"quant_method": "lowbit", "version": 2}.items()
    assert not hasattr(lowbit.load(tmp_path / "int8").config, "quantization_config")


def test_a_config_that_gives_no_model_is_an_error_of_the_checkpoint(tmp_path):
    model = models.llama()
    lowbit.save(model, tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    for bad in ({**good, "model_type": "no such"}, {**good, "hidden_size": "wide"}, {**good, "num_hidden_layers": 1}, [], "cut"):
        path.write_text("{" if bad == "cut" else json.dumps(bad))
        with pytest.raises(CheckpointError, match=r"config\.json|model\.safetensors"):
            lowbit.load(tmp_path)
    path.write_text(json.dumps({**good, "architectures": ["os", "pipeline"]}))
    same(model, lowbit.load(tmp_path))  # by its model_type
    path.unlink()
    with pytest.raises(CheckpointError, match="give the float model as model="):
        lowbit.load(tmp_path)


def test_the_device_argument(tmp_path):
    lowbit.save(nn.Sequential(quantized(nn.Linear(8, 4)), nn.BatchNorm1d(4)), tmp_path)
    loaded = lowbit.load(tmp_path, model=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), device="meta")
    assert {t.device.type for t in [*loaded.parameters(), *loaded.buffers()]} == {"meta"}
    assert loaded[0].weight.device.type == "meta"


def test_loading_within_inference_mode_and_into_a_quantized_model(tmp_path):
    model = models.llama()
    lowbit.quantize_(model, "int4")
    lowbit.save(model, tmp_path)
    with torch.inference_mode(), torch.device("meta"):
        loaded = lowbit.load(tmp_path)
    same(model, loaded)
    assert not any(tensor.is_inference() for tensor in loaded.parameters())
    with torch.no_grad():
        loaded.model.norm.weight.zero_()
    assert lowbit.load(tmp_path, model=loaded) is loaded
    same(model, loaded)
    lowbit.save(loaded, tmp_path)  # over the files that it came from
    same(model, lowbit.load(tmp_path))


@pytest.mark.gpu
def test_tensors_go_to_the_device_and_come_back_from_it(tmp_path):
    model = models.llama()
    lowbit.quantize_(model, "int4")
    lowbit.save(model, tmp_path / "cpu")
    on_device = lowbit.load(tmp_path / "cpu", device="cuda")
    assert {t.device.type for t in [*on_device.parameters(), *on_device.buffers()]} == {"cuda"}
    lowbit.save(on_device, tmp_path / "cuda")
    assert (tmp_path / "cuda/model.safetensors").read_bytes() == (tmp_path / "cpu/model.safetensors").read_bytes()


def test_what_cannot_be_saved_is_named(tmp_path):
    class Stateful(nn.Module):
        def get_extra_state(self) -> int:
            return 3

    cases = {
        r"0\.weight is on the meta device": nn.Sequential(nn.Linear(2, 2, device="meta")),
        "Stateful has state of its own": nn.Sequential(Stateful()),
        r"0\.weight has no shape yet": nn.Sequential(nn.LazyLinear(3)),
        r"x is torch\.strided torch\.complex128": nn.Module(),
        "can be stored": nn.Module(),
    }
    cases[r"x is torch\.strided torch\.complex128"].x = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    cases["can be stored"].x = nn.Parameter(QTensor.quantize(torch.ones(3, 4), "int4").view(-1), requires_grad=False)
    for message, model in cases.items():
        with pytest.raises(ValueError, match=message):
            lowbit.save(model, tmp_path)
    with pytest.raises(TypeError, match=r"an nn\.Module, got dict"):
        lowbit.save({}, tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes must be an int of at least 1, got 0"):
        lowbit.save(nn.Linear(1, 1), tmp_path, max_shard_bytes=0)
    assert files(tmp_path) == []


def _peak(action) -> int:
    """Bytes of memory that ``action`` takes at most beyond what was there."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present

    def kilobytes(key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1])

    before = kilobytes("VmRSS")
    action()
    return (kilobytes("VmHWM") - before) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is read from Linux")
def test_memory_is_the_file_and_one_tensor(tmp_path):
    def layers(device: str) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(1024, 2048, bias=False, device=device) for _ in range(8)))

    model, one, slack = layers("cpu"), 2048 * 1024 * 4, 4 << 20
    assert _peak(lambda: lowbit.save(model, tmp_path)) < one + slack
    kept = []
    fresh = layers("meta")
    assert (
        _peak(lambda: kept.append(lowbit.load(tmp_path, model=fresh)))
        < os.path.getsize(tmp_path / "model.safetensors") + one + slack
    )
    same(model, kept[0])


def test_views_that_negate_and_conjugate_are_tensors_of_their_own(tmp_path):
    numbers = torch.randn(3, dtype=torch.complex64)
    model, again = nn.Module(), nn.Module()
    for name, tensor in {"plain": numbers, "conjugate": numbers.conj(), "negative": numbers.conj().imag}.items():
        model.register_buffer(name, tensor)
        again.register_buffer(name, torch.zeros(3, dtype=tensor.dtype))
    lowbit.save(model, tmp_path)
    lowbit.load(tmp_path, model=again)
    assert all(torch.equal(getattr(again, name), tensor) for name, tensor in model.named_buffers())


def test_a_name_that_the_format_keeps_for_itself(tmp_path):
    model = nn.Module()
    model.register_buffer("__metadata__", torch.zeros(3))
    with pytest.raises(ValueError, match="can be called __metadata__"):
        lowbit.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
