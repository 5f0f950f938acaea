"""Steps of whole decoder layers beside the modules they stand for, and beside float64 of the same quantized weights.

A step rounds where the modules round and multiplies by the same limbs; norms and attention are summed in another order. So its
errors are of the size of theirs, which float64 tells, and greedy decoding in float32 writes the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from lowbit import QLinear, fuse_, quantize_
from lowbit_kernels.registry import trace
from tests.support.processors import needs_split_int8

pytestmark = needs_split_int8

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 96, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip
MODELS = ("Llama", "Qwen2", "Qwen3", "Mistral")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _models(name: str, dtype: torch.dtype, scheme: str, others: tuple[tuple[str, Any], ...]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    sizes = {**SIZES, **({"sliding_window": None} if name == "Mistral" else {}), **dict(others)}
    plain = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).to(dtype).eval()
    for key, parameter in plain.named_parameters():
        if "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif key.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    quantize_(plain, scheme)
    fused = copy.deepcopy(plain)
    fuse_(fused, torch.ones(1, 3, dtype=torch.long))
    return plain, fused


def models(name: str = "Llama", dtype: torch.dtype = torch.float32, scheme: str = "int4_g32", **others: Any) -> tuple[Any, Any]:
    """A quantized model, and the same fused: of this test alone."""
    plain, fused = (copy.deepcopy(model) for model in _models(name, dtype, scheme, tuple(others.items())))
    fuse_(fused, torch.ones(1, 3, dtype=torch.long))  # a copy is by itself
    return plain, fused


def exact(model: nn.Module) -> Any:
    """``model`` in float64 with the numbers that its weights stand for."""
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, QLinear):
            linear = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            linear.weight = nn.Parameter(module.weight.dequantize(torch.float32))
            linear.bias = module.bias
            made.set_submodule(name, linear)
    made.config._attn_implementation = "sdpa"
    return made.double()


def ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(seed))


def steps(record: Any, kernel: str = "cpu_decoder_step") -> int:
    return sum(count for entry, count in record.counts.items() if entry.kernel == kernel)


def reasons(record: Any) -> set[str]:
    return {entry.contract for entry in record.counts if entry.kernel == "modules"}


@torch.no_grad()
def logits(model: Any, tokens: Tensor, prompt: int, mask: Tensor | None = None, at_once: int = 1, cache: Any = None) -> Tensor:
    """Logits behind ``prompt`` tokens, the others given ``at_once`` at a time."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    out = []
    for begin, end in [(0, prompt), *((i, i + at_once) for i in range(prompt, tokens.shape[1], at_once))]:
        how = {} if mask is None else {"attention_mask": mask[:, :end]}
        out.append(model(tokens[:, begin:end], past_key_values=cache, use_cache=True, **how).logits)
    return torch.cat(out[1:], 1).double()


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def assert_close(got: Tensor, want: Tensor) -> None:
    """Of float32: sums of 256 numbers at most, in another order, in four products one behind the other in each of two layers."""
    assert rms(got.double() - want.double()) <= 8 * 256 * 2.0**-24 * rms(want)


def left_padded(batch: int, tokens: int) -> Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.long)
    for i in range(batch):
        mask[i, : 2 * i] = 0
    return mask


def assert_as_exact(plain: Any, fused: Any, tokens: Tensor, prompt: int, mask: Tensor | None = None, **how: Any) -> None:
    """The step's errors are no more than twice those of the modules: the same roundings, other sums."""
    with trace() as record:
        got = logits(fused, tokens, prompt, mask, **how)
    assert steps(record) == len(fused.model.layers) * ((tokens.shape[1] - prompt) // how.get("at_once", 1)), record
    want = logits(exact(plain), tokens, prompt, mask, **how)
    apart = logits(plain, tokens, prompt, mask, **how)
    assert rms(got - want) <= 2 * rms(apart - want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_errors_are_those_of_the_modules(name: str, dtype: torch.dtype) -> None:
    assert_as_exact(*models(name, dtype), ids(1, 24), 6)


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4_sym", "int3_g64", "int2_g32", "mxint8", "mxfp4", "int4_g16"])
def test_schemes_that_digits_multiply(scheme: str) -> None:
    assert_as_exact(*models("Qwen2", torch.bfloat16, scheme), ids(2, 16), 4)


@pytest.mark.parametrize(("batch", "at_once"), [(1, 1), (3, 1), (1, 4), (2, 4), (16, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_batches_and_several_tokens(batch: int, at_once: int, padded: bool) -> None:
    plain, fused = models("Qwen3")
    mask = left_padded(batch, 32) if padded and batch <= 3 else None
    assert_as_exact(plain, fused, ids(batch, 32), 8, mask, at_once=at_once)


def test_heads_of_every_sharing() -> None:
    for heads, keys, size in ((4, 4, 32), (4, 1, 48), (6, 3, 16), (8, 2, 80)):
        sizes = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": size}
        assert_as_exact(*models("Qwen3", torch.float32, **sizes), ids(2, 12), 5)


def test_rounded_activations_step_too() -> None:
    plain, fused = models("Llama", torch.bfloat16, "int8_dynamic_activation_int8_weight")
    with trace() as record:
        got = logits(fused, ids(2, 12), 4)
    assert steps(record) == 16
    want, apart = logits(exact(plain), ids(2, 12), 4), logits(plain, ids(2, 12), 4)
    assert rms(got - want) <= 2 * rms(apart - want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_make_no_difference(threads: int) -> None:
    _, fused = models("Qwen2", torch.bfloat16)
    tokens = ids(3, 20)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = logits(fused, tokens, 4)
        torch.set_num_threads(threads)
        for _ in range(3):
            assert torch.equal(logits(fused, tokens, 4), want)
    finally:
        torch.set_num_threads(before)


# ---- generate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "batch"),
    [
        *itertools.product(
            [
                {},
                {"num_beams": 3},
                {"num_beams": 4, "num_return_sequences": 2, "num_beam_groups": 1},
                {"cache_implementation": "static"},
            ],
            [1, 3],
        ),
        ({"prompt_lookup_num_tokens": 3}, 1),  # which takes one sequence alone
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_generate_writes_the_same(how: dict[str, Any], batch: int) -> None:
    plain, fused = models("Qwen2")
    prompt = ids(batch, 9)
    how = {"attention_mask": left_padded(batch, 9), "max_new_tokens": 24, "do_sample": False, "disable_compile": True, **how}
    with trace() as record:
        got = fused.generate(prompt, **how)
    assert steps(record)
    assert torch.equal(got, plain.generate(prompt, **how))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode: Callable[[], Any]) -> None:
    plain, fused = models()
    cache, other = DynamicCache(), DynamicCache()
    with mode(), trace() as record:
        for part in ids(1, 8).split([4, 1, 1, 1, 1], 1):
            got, want = fused(part, past_key_values=cache).logits, plain(part, past_key_values=other).logits
            assert_close(got, want)
    assert steps(record) == 8


def test_static_cache() -> None:
    plain, fused = models("Llama")
    with trace() as record:
        got = logits(fused, ids(2, 12), 4, cache=StaticCache(config=fused.config, max_cache_len=20))
    assert steps(record) == 16
    assert_close(got, logits(plain, ids(2, 12), 4, cache=StaticCache(config=plain.config, max_cache_len=20)))
    assert_close(got, logits(plain, ids(2, 12), 4))


# ---- caches --------------------------------------------------------------------------------------------------------


def held(cache: Any) -> list[Tensor]:
    return [kept for layer in cache.layers for kept in (layer.keys, layer.values)]


@torch.no_grad()
def test_what_a_cache_gave_out_never_changes() -> None:
    plain, fused = models()
    cache, other = DynamicCache(), DynamicCache()
    given: list[tuple[Tensor, Tensor]] = []
    tokens = ids(2, 64)
    fused(tokens[:, :5], past_key_values=cache), plain(tokens[:, :5], past_key_values=other)
    for i in range(5, 60):
        fused(tokens[:, i : i + 1], past_key_values=cache), plain(tokens[:, i : i + 1], past_key_values=other)
        given += [(kept, kept.clone()) for kept in held(cache)]
        if i % 11 == 0:
            cache.crop(-3), other.crop(-3)
        for mine, theirs in zip(held(cache), held(other), strict=True):
            assert_close(mine, theirs)
    assert all(torch.equal(kept, then) for kept, then in given)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@torch.no_grad()
def test_caches_that_part(copied: Callable[[Any], Any]) -> None:
    """Two that held the same go on with different tokens."""
    plain, fused = models()
    tokens, others = ids(1, 12, 1), ids(1, 12, 2)
    others[:, :6] = tokens[:, :6]
    cache = DynamicCache()
    for part in tokens[:, :6].split([4, 1, 1], 1):
        fused(part, past_key_values=cache)
    second = copied(cache)
    second.layers = [copied(layer) for layer in cache.layers]
    out: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i in range(6, 12):
        out[0].append(fused(tokens[:, i : i + 1], past_key_values=cache).logits)
        out[1].append(fused(others[:, i : i + 1], past_key_values=second).logits)
    for some, got in ((tokens, out[0]), (others, out[1])):
        assert_close(torch.cat(got, 1), logits(plain, some, 6))


@torch.no_grad()
def test_a_cache_that_is_written_to() -> None:
    plain, fused = models()
    results = []
    for model in (plain, fused):
        cache = DynamicCache()
        for part in ids(1, 8).split([4, 1, 1, 1, 1], 1):
            y = model(part, past_key_values=cache).logits
            for kept in held(cache):
                kept.mul_(0.5)
            cache.layers[0].keys = cache.layers[0].keys.roll(1, 2)
        results.append(y)
    assert_close(*results)
