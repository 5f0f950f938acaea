"""When decoder layers run their modules as before they were fused, and copies, threads and compilers of fused ones."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

import lowbit
from lowbit import fuse_
from lowbit_kernels.registry import NoKernelError, strict, trace
from tests.lowbit.test_decoder import assert_close, ids, logits, models, reasons, steps
from tests.support.processors import needs_split_int8

pytestmark = needs_split_int8


# ---- what the modules do as before ---------------------------------------------------------------------------------


class Twice(nn.Module):
    """What wraps a linear layer, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def _hook(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, y: 2 * y)


def _wrapped(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = Twice(model.model.layers[1].mlp.up_proj)


def _weight(model: Any) -> None:
    q = model.model.layers[1].self_attn.q_proj
    q.weight = lowbit.QTensor.quantize(torch.ones(*q.weight.shape), "int4_g32")


def _forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def _norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _kept_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = nn.LayerNorm(128)


def _training(model: Any) -> None:
    model.model.layers[1].train()


@pytest.mark.parametrize("change", [_hook, _wrapped, _weight, _forward, _norm, _kept_norm, _training])
def test_a_layer_that_changes_runs_its_modules(change: Callable[[Any], None]) -> None:
    plain, fused = models()
    for model in (plain, fused):
        torch.manual_seed(1)
        change(model)
    with trace() as record:
        got = logits(fused, ids(1, 8), 4)
    assert steps(record) == 4, record
    assert steps(record, "modules") >= 4, record
    assert_close(got, logits(plain, ids(1, 8), 4))


@pytest.mark.parametrize("write", ["weight", "bias", "norm", "scale", "data"])
def test_writes_are_seen(write: str) -> None:
    plain, fused = models("Qwen2")
    logits(fused, ids(1, 6), 4)
    for model in (plain, fused):
        layer, generator = model.model.layers[0], torch.Generator().manual_seed(3)
        with torch.no_grad():
            if write == "weight":
                layer.mlp.gate_proj.weight.copy_(torch.randn(256, 128, generator=generator))
            elif write == "bias":
                layer.self_attn.k_proj.bias.add_(1)
            elif write == "norm":
                layer.post_attention_layernorm.weight.mul_(2)
            elif write == "scale":
                layer.self_attn.o_proj.weight.scale.mul_(2)
            else:
                layer.input_layernorm.weight.data = torch.rand(128, generator=generator)
    assert_close(logits(fused, ids(1, 8), 4), logits(plain, ids(1, 8), 4))


@pytest.mark.parametrize(
    ("name", "others", "reason"),
    [("Llama", {"attn_implementation": "eager"}, "attention"), ("Mistral", {"sliding_window": 6}, "cache")],
)
def test_attention_of_another_kind(name: str, others: dict[str, Any], reason: str) -> None:
    plain, fused = models(name, **others)
    with trace() as record:
        got = logits(fused, ids(1, 20), 4)
    assert not steps(record)
    assert reason in reasons(record)
    assert_close(got, logits(plain, ids(1, 20), 4))


def test_a_layer_of_other_code_is_left_alone() -> None:
    _, fused = models("Granite" if hasattr(transformers, "GraniteConfig") else "Phi3")
    with trace() as record:
        logits(fused, ids(1, 6), 4)
    assert not steps(record)


@torch.no_grad()
def test_attentions_and_hidden_states_are_given() -> None:
    plain, fused = models(attn_implementation="eager")
    for model in (plain, fused):
        model.config._attn_implementation = "sdpa"
    cache, other = DynamicCache(), DynamicCache()
    for part in ids(1, 6).split([4, 1, 1], 1):
        got, want = (m(part, past_key_values=c, output_hidden_states=True) for m, c in ((fused, cache), (plain, other)))
        for mine, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
            assert_close(mine, theirs)


def test_gradients_go_through_the_modules() -> None:
    plain, fused = models()
    results = []
    for model in (plain, fused):
        cache = DynamicCache()
        with torch.no_grad():
            model(ids(1, 4), past_key_values=cache)
        x = model.get_input_embeddings()(ids(1, 1)).detach().requires_grad_()
        model(inputs_embeds=x, past_key_values=cache).logits.sum().backward()
        results.append(x.grad)
    assert_close(*results)


@torch.no_grad()
def test_numbers_without_digits() -> None:
    plain, fused = models(dtype=torch.bfloat16)
    for number in (float("nan"), float("inf"), 2.0**-120):
        results = []
        for model in (plain, fused):
            cache = DynamicCache()
            model(ids(1, 4), past_key_values=cache)
            x = torch.full((1, 1, 128), number, dtype=torch.bfloat16)
            with trace() as record:
                results.append(model(inputs_embeds=x, past_key_values=cache).logits)
        torch.testing.assert_close(*results, equal_nan=True, rtol=0.02, atol=0.02)
        assert record.counts


def test_modes_that_look_at_operators() -> None:
    plain, fused = models()
    for mode in (lambda: torch.autocast("cpu", torch.bfloat16), strict, lambda: strict("cpu_interleaved_split_int8x3_gemv")):
        with contextlib.ExitStack() as stack, trace() as record:
            stack.enter_context(mode())
            try:
                got = logits(fused, ids(1, 6), 4)
            except NoKernelError:
                with pytest.raises(NoKernelError):
                    logits(plain, ids(1, 6), 4)
                continue
            assert_close(got, logits(plain, ids(1, 6), 4))
        assert not steps(record)


def test_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = models()
    want = logits(fused, ids(2, 8), 4)
    monkeypatch.setenv("LOWBIT_CPU", "avx2")
    assert_close(logits(fused, ids(2, 8), 4), want)  # which was prepared before
    with trace() as record:
        assert_close(logits(models()[1], ids(2, 8), 4), want)
    assert steps(record) == 8


# ---- copies, threads, compilers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_by_themselves(copied: Callable[[Any], Any]) -> None:
    plain, fused = models("Qwen3")
    made = copied(fused)
    assert type(made.model.layers[0]) is type(plain.model.layers[0])
    with trace() as record:
        got = logits(made, ids(1, 6), 4)
    assert not steps(record)
    assert_close(got, logits(plain, ids(1, 6), 4))
    assert fused.state_dict().keys() == plain.state_dict().keys()
    with trace() as record:
        logits(fused, ids(1, 6), 4)
    assert steps(record)


def test_a_fused_model_looks_as_before() -> None:
    plain, fused = models()
    assert repr(fused) == repr(plain)
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(fused.model.layers[:1]) == [fused.model.layers[0]]
    fuse_(fused, ids(1, 3))  # again
    with trace() as record:
        assert_close(logits(fused, ids(1, 6), 4), logits(plain, ids(1, 6), 4))
    assert steps(record) == 4


def test_fewer_layers_than_there_are() -> None:
    """A model may go through some of them alone."""
    plain, fused = models("Qwen2")
    for model in (plain, fused):
        model.config.num_hidden_layers = 1
    with trace() as record:
        assert_close(logits(fused, ids(1, 6), 4), logits(plain, ids(1, 6), 4))
    assert steps(record) == 2


def test_threads_share_a_model() -> None:
    _, fused = models("Qwen2", torch.bfloat16)
    tokens = [ids(1, 40, seed) for seed in range(4)]
    want, got = [logits(fused, some, 4) for some in tokens], [torch.empty(0)] * 4

    def run(i: int) -> None:
        got[i] = logits(fused, tokens[i], 4)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


@torch.no_grad()
def test_compiled_layers_run_their_modules() -> None:
    plain, fused = models()
    compiled = torch.compile(fused.model, backend="eager")
    cache, other = DynamicCache(), DynamicCache()
    for part in ids(1, 6).split([4, 1, 1], 1):
        got = compiled(part, past_key_values=cache).last_hidden_state
        assert_close(got, plain.model(part, past_key_values=other).last_hidden_state)
