"""A QTensor times a number, in place; rows that are added to it or taken away; and models that do either to their weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import QEmbedding, QLinear, QTensor, quantize_
from lowbit.formats import FORMATS
from lowbit.scheme import PLAIN_SCALES
from tests.support.models import llama, tokens
from tests.support.strategies import schemes

K = 40


def weight(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, K, generator=torch.Generator().manual_seed(seed))


def parts(q: QTensor) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in q.canonical()._parts().items()}


def held(q: QTensor, factor: float) -> bool:
    """Whether the scales that stand above all others can each be multiplied by ``factor`` without being rounded."""
    if q.outer is not None:
        exact = q.outer.double() * factor
        return torch.equal(exact.float().double(), exact)
    if q.scheme.scale in PLAIN_SCALES:
        exact = q.scale.double() * factor
        return torch.equal(exact.to(q.scale.dtype).double(), exact)
    values = set(FORMATS[q.scheme.scale].values)
    return all(float(value) * factor in values for value in FORMATS[q.scheme.scale].decode(q.scale, torch.float64).flatten())


@given(
    scheme=schemes(), factor=st.sampled_from([2.0**k for k in range(-12, 13)] + [3, 0.75, 1.1, -2, 0, 1]), turned=st.booleans()
)
@settings(max_examples=80)
def test_what_the_scales_take_exactly_rounds_no_code(scheme, factor, turned):
    q = QTensor.quantize(weight(6), scheme)
    rounded = copy.deepcopy(q)
    rounded.copy_(q.dequantize() * factor)
    before, values, exact = parts(q), q.dequantize(torch.float64), factor > 0 and held(q.canonical(), factor)
    view = q.t() if turned else q
    assert view.mul_(factor) is view
    if not exact:
        assert torch.equal(q.dequantize(), rounded.dequantize())
        return
    assert torch.equal(q.dequantize(torch.float64), values * factor)
    after = parts(q)
    assert all(torch.equal(after[name], before[name]) for name in ("packed", "zero_point") if name in before)
    view.div_(factor)
    assert all(torch.equal(part, before[name]) for name, part in parts(q).items())


def test_a_slice_scales_its_own_rows_alone():
    q = QTensor.quantize(weight(6), "int4")
    before = q.dequantize()
    q[2:4].mul_(4)
    assert torch.equal(q.dequantize(), torch.cat([before[:2], before[2:4] * 4, before[4:]]))


# ---- rows ------------------------------------------------------------------------------------------------------


@given(scheme=schemes(), rows=st.integers(1, 9), like=st.sampled_from(["plain", "layer"]))
@settings(max_examples=60)
def test_data_may_have_other_rows(scheme, rows, like):
    q = QTensor.quantize(weight(5), scheme)
    if like == "layer":
        q = QLinear(q).weight
    old, reference, identity = q.dequantize(), q, id(q)
    new = torch.cat([old, weight(9, 1)])[:rows]
    q.data = new
    assert q is reference
    assert id(q) == identity
    assert q.shape == (rows, K)
    assert q.scheme == scheme
    n = min(5, rows)
    if scheme.outer:
        assert torch.equal(q.dequantize(), QTensor.quantize(new, scheme).dequantize())
    else:
        assert torch.equal(q.dequantize()[:n], old[:n])
        assert rows <= 5 or torch.equal(q.dequantize()[5:], QTensor.quantize(new[5:], scheme).dequantize())
    x = torch.randn(2, K)
    torch.testing.assert_close(nn.functional.linear(x, q), x @ q.dequantize().T)


def test_data_of_another_shape_is_refused():
    q = QTensor.quantize(weight(5), "int8")
    for shape in ((5, K - 1), (K, 5), (1, 5, K), (5 * K,)):
        with pytest.raises(ValueError, match=r"must have its shape, or more or fewer rows, got"):
            q.data = torch.zeros(shape)
    with pytest.raises(ValueError, match="must have its shape"):
        q.t().data = torch.zeros(K, 6)


RECIPES = [
    {"*embed_tokens": "int4_g32", "*": "int4"},
    {"lm_head": "int8_dynamic_activation_int8_weight", "*": "int4"},
    {"lm_head": "mxfp4", "*embed_tokens": "mxfp4", "*": "int4"},
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [80, 104, None])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.filterwarnings("ignore:The new")
def test_a_vocabulary_changes(recipe, size, tied, tmp_path: Path):
    if tied:
        target = next(iter(recipe.values()))
        recipe = {"*embed_tokens": target, "lm_head": target, "*": "int4"}
    model = llama(tied=tied)
    if not tied:
        model.lm_head.bias = nn.Parameter(torch.randn(96))
    quantize_(model, recipe)
    classes = {name: type(module) for name, module in model.named_modules()}
    activation = getattr(model.lm_head, "activation", None)
    ids = tokens() % 80
    before = model(ids).logits
    first = [module.weight.dequantize()[:80] for module in (model.lm_head, model.model.embed_tokens) if hasattr(module, "scheme")]
    given = model.resize_token_embeddings(size, mean_resizing=False)
    assert given is model.get_input_embeddings()
    rows = size or 96
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert model.get_output_embeddings().weight.shape == model.get_input_embeddings().weight.shape == (rows, 64)
    assert (model.lm_head.out_features, model.model.embed_tokens.num_embeddings, model.config.vocab_size) == (rows, rows, rows)
    assert getattr(model.lm_head, "activation", None) == activation
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    last = [module.weight.dequantize()[:80] for module in (model.lm_head, model.model.embed_tokens) if hasattr(module, "scheme")]
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    after = model(ids).logits
    k = min(rows, 96)
    torch.testing.assert_close(after[..., :k], before[..., :k])
    if rows > 96:  # new rows are there, and are numbers
        assert model(torch.full((1, 3), rows - 1)).logits.isfinite().all()
    for name, duplicate in (("a copy", copy.deepcopy(model)), ("a file", None)):
        if duplicate is None and tied:
            lowbit.save(model, tmp_path)
            duplicate = lowbit.load(tmp_path)
        if duplicate is not None:
            assert torch.equal(duplicate(ids).logits, after), name
            duplicate.resize_token_embeddings(70, mean_resizing=False)
            assert {n: type(module) for n, module in duplicate.named_modules()} == classes


@pytest.mark.filterwarnings("ignore:The new")
def test_a_head_keeps_what_is_done_to_its_input():
    model = llama(tied=False)
    lowbit.rewrite_(model, "rotation(int8)")
    quantize_(model, lowbit.awq({"lm_head": "int8", "*": None}), calibration=tokens(4))
    head = model.lm_head
    head.transform = lowbit.transforms.ChannelScale(torch.full((64,), 2.0))
    before = model(tokens() % 80).logits
    model.resize_token_embeddings(80)
    assert model.lm_head is head
    torch.testing.assert_close(model(tokens() % 80).logits, before[..., :80])


# ---- RWKV divides weights for inference --------------------------------------------------------------------------


def rwkv() -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"context_length": 32, "hidden_size": 64, "intermediate_size": 112, "attention_hidden_size": 64}
    config = transformers.RwkvConfig(vocab_size=96, num_hidden_layers=4, rescale_every=2, **settings)
    return transformers.RwkvForCausalLM(config).eval()


@pytest.mark.parametrize("scheme", ["int8", "int4", "int3", "mxfp4", "nvfp4", "nf4", "fp8"])
def test_rwkv_scales_its_weights_as_it_does_float_ones(scheme, tmp_path):
    model = rwkv()
    dense = copy.deepcopy(model)
    plan = quantize_(model, scheme)
    assert len(plan.quantized) == 28
    for name, module in model.named_modules():
        if isinstance(module, QLinear):
            dense.get_submodule(name).weight.data = module.weight.dequantize()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lowbit.save(model, tmp_path)
    ids = tokens()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits)
        assert torch.equal(lowbit.load(tmp_path)(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"rwkv: a RwkvModel has divided weights for inference"):
        lowbit.save(model, tmp_path)
    model.train(), dense.train()
    torch.testing.assert_close(model(ids).logits, dense(ids).logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    lowbit.save(model, tmp_path)


# ---- what transformers says of a model ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", [*RECIPES[:3], "nvfp4", "int3"], ids=str)
def test_counts_dtype_and_bytes_are_those_of_the_weights(recipe, tied, dtype):
    if tied and isinstance(recipe, dict):
        recipe = {**dict.fromkeys(("*embed_tokens", "lm_head"), next(iter(recipe.values()))), "*": "int4"}
    model = llama(tied=tied, dtype=dtype)
    count, without = model.num_parameters(), model.num_parameters(exclude_embeddings=True)
    quantize_(model, recipe)
    assert (model.num_parameters(), model.num_parameters(exclude_embeddings=True), model.dtype) == (count, without, dtype)
    quantized = {id(m): m.weight for m in model.modules() if isinstance(m, QLinear | QEmbedding)}
    weights = {id(weight): weight for weight in quantized.values()}
    left = [parameter for parameter in model.parameters() if id(parameter) not in weights]
    assert model.num_parameters(only_trainable=True) == sum(parameter.numel() for parameter in left)
    stored = sum(part.nbytes for weight in weights.values() for part in weight._parts().values())
    stored += sum(tensor.nbytes for tensor in (*left, *model.buffers()))
    assert model.get_memory_footprint() == pytest.approx(stored, abs=1)
