"""Models are calibrated on what they read when their user calls them: whatever they keep, and whatever else a batch holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from lowbit import doctor, quantize_, sensitivity
from lowbit.calibration.blocks import call
from lowbit.calibration.cache_and_loss import is_cache
from lowbit.calibration.data import Batch
from lowbit.calibration.pytree import tree_leaves
from tests.ecosystem.test_architectures import CODER, GROUPED, SMALL
from tests.lowbit.calibration.test_calibrate import check_statistics, seen, spying  # noqa: F401 - a fixture

TINY = {**GROUPED, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
T5: dict[str, Any] = {
    "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {**CODER, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", TINY),
    "bloom": (
        "BloomForCausalLM", "BloomConfig", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM", "Gemma3nTextConfig",
        {
            **TINY, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96, "laurel_rank": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM", "Mamba2Config",
        {
            "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2,
            "state_size": 8, "pad_token_id": 0,
        },
    ),
    "xglm": (
        "XGLMForCausalLM", "XGLMConfig", {"vocab_size": 96, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    ),
}  # fmt: skip
CODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5),
    "switch": (
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        {**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2},
    ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", BART),
    "marian": ("MarianMTModel", "MarianConfig", BART),
    "prophetnet": (
        "ProphetNetForConditionalGeneration", "ProphetNetConfig",
        {
            "vocab_size": 96, "hidden_size": 32, "encoder_ffn_dim": 48, "num_encoder_layers": 2, "num_encoder_attention_heads": 4,
            "decoder_ffn_dim": 48, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "max_position_embeddings": 64,
            "pad_token_id": 0, "decoder_start_token_id": 1,
        },
    ),
}  # fmt: skip


def built(name: str) -> nn.Module:
    model, config, settings = {**DECODERS, **CODERS}[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


def ids(seed: int = 1, length: int = 8) -> Tensor:
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(seed))


def calls_for(name: str) -> list[dict[str, Tensor]]:
    calls = [{"input_ids": ids(seed, 6 + seed)} for seed in (1, 2)]
    return [{**call, "decoder_input_ids": call["input_ids"].flip(1)[:, 1:]} for call in calls] if name in CODERS else calls


class Inside(nn.Module):
    """A model within a user's own module, which may ask for a cache or bring one."""

    def __init__(self, model: nn.Module, cache: str = "") -> None:
        super().__init__()
        self.inner, self.cache = model, cache

    def forward(self, **given: Any) -> Any:
        if self.cache:
            given["use_cache"] = True
        if self.cache == "own":
            given["past_key_values"] = DynamicCache(config=self.inner.config)
        return self.inner(**given)


# ---- caches ----------------------------------------------------------------------------------------------------------


INSIDE = [(name, cache) for name in (*DECODERS, *CODERS) for cache in ("", "asked for")]
INSIDE.remove(("switch", "asked for"))  # which its encoder refuses


@pytest.mark.parametrize(("name", "cache"), INSIDE)
def test_statistics_within_a_module_of_the_users(name, cache, seen):  # noqa: F811
    """Blocks run more than once, and none finds in a cache what it put there before."""
    check_statistics(Inside(built(name), cache), calls_for(name), seen)


@pytest.mark.parametrize("name", ["mt5", "switch", "gemma3n"])
def test_statistics_of_models_that_keep_something_between_blocks(name, seen):  # noqa: F811
    check_statistics(built(name), calls_for(name), seen)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_cache_that_the_caller_brings(name, seen):  # noqa: F811
    """It holds what came before: each run reads that, and leaves it as it is."""
    model = built(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(5, 4), past_key_values=cache, use_cache=True)
    before = [layer.keys.clone() for layer in cache.layers]
    plain = copy.deepcopy(model)
    quantize_(model, spying(), calibration=[{"input_ids": ids(), "past_key_values": cache, "attention_mask": torch.ones(2, 12)}])
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    rows: list[Tensor] = []
    name = next(name for name, module in plain.named_modules() if isinstance(module, nn.Linear))
    plain.get_submodule(name).register_forward_pre_hook(lambda module, args: rows.append(args[0].detach().double()))
    with torch.no_grad():
        plain(ids(), past_key_values=copy.deepcopy(cache), attention_mask=torch.ones(2, 12))
    x = torch.cat(rows).flatten(0, -2)
    torch.testing.assert_close(seen[0][1].gram.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-6)
    check_statistics(Inside(plain, "own"), [{"input_ids": ids(3)}], seen_anew(seen))


def seen_anew(found: list[Any]) -> list[Any]:
    found.clear()
    return found


@pytest.mark.parametrize("name", [*DECODERS, *CODERS])
def test_no_cache_is_made_where_nobody_asks_for_one(name):
    """Keys and values of a whole model take memory that nobody reads."""
    model = Inside(built(name))
    settings = [copy.deepcopy(module.config.to_dict()) for module in model.modules() if hasattr(module, "config")]
    with torch.no_grad():
        output = call(model, Batch((), calls_for(name)[0]))
    assert not any(is_cache(leaf) for leaf in tree_leaves(output))
    assert [module.config.to_dict() for module in model.modules() if hasattr(module, "config")] == settings


class Counter:
    """What a user's blocks hand on beside their output."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, counter: Any) -> Tensor:
        return self.a(x + self.reported(counter, x))

    def reported(self, counter: Any, x: Tensor) -> Tensor:
        counter.seen.append(x)
        return counter.seen[0] * len(counter.seen)


class Adding(Counting):
    def reported(self, counter: Any, x: Tensor) -> Tensor:
        counter["sum"] = counter.get("sum", 0) + x
        return counter["sum"]


class InPlace(Counting):
    def reported(self, counter: Any, x: Tensor) -> Tensor:
        return counter.add_(x)


class Stack(nn.Module):
    def __init__(self, block: type[Counting], make: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        counter = self.make()
        for block in self.blocks:
            x = block(x, counter)
        return x


@pytest.mark.parametrize(
    ("block", "make", "kind"),
    [(Counting, Counter, "list"), (Adding, dict, "dict"), (InPlace, lambda: torch.zeros(20, 8), "Tensor")],
)
def test_blocks_that_hand_something_on_beside_their_output(block, make, kind, seen):  # noqa: F811
    torch.manual_seed(0)
    model = Stack(block, make)
    plain, x = copy.deepcopy(model), torch.randn(20, 8)
    plan = quantize_(model, spying(), calibration=x)
    assert any(f"changes the {kind} that it is called with" in note for note in plan.notes)
    rows: list[Tensor] = []
    plain.blocks[2].a.register_forward_pre_hook(lambda module, args: rows.append(args[0].detach().double()))
    plain(x)
    torch.testing.assert_close(seen[2][1].gram.double(), rows[0].T @ rows[0] / 20, rtol=1e-4, atol=1e-5)


STATIC = "int8_static_activation_int8_weight"  # in whose bytes the largest input shows


# ---- labels ----------------------------------------------------------------------------------------------------------


def bytes_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    found, wanted = bytes_of(one), bytes_of(other)
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("name", CODERS)
def test_a_decoder_reads_what_its_model_makes_of_labels(name):
    labels = ids(3, 5)
    labels[1, 3:] = -100
    model = built(name)
    duplicate, recorded = copy.deepcopy(model), []

    def record(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        recorded.append(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

    hook = duplicate.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    duplicate(input_ids=ids(), labels=labels)
    hook.remove()
    quantize_(model, STATIC, calibration=[{"input_ids": ids(), "labels": labels}])
    quantize_(duplicate, STATIC, calibration=[{"input_ids": ids(), "labels": labels, "decoder_input_ids": recorded[0]}])
    assert_same(model, duplicate)


HEADS: dict[str, tuple[str, str, dict[str, Any], Tensor]] = {
    "language model": ("LlamaForCausalLM", "LlamaConfig", TINY, ids()),
    "masked": ("BertForMaskedLM", "BertConfig", SMALL, ids()),
    "without a label that counts": ("LlamaForCausalLM", "LlamaConfig", TINY, torch.full((2, 8), -100)),
    "sequence": ("BertForSequenceClassification", "BertConfig", SMALL, torch.tensor([0, 1])),
    "token": ("BertForTokenClassification", "BertConfig", SMALL, torch.zeros(2, 8, dtype=torch.long)),
    "without a head": ("LlamaModel", "LlamaConfig", TINY, ids()),
}


@pytest.mark.parametrize("head", HEADS)
def test_labels_change_nothing_where_only_the_loss_reads_them(head):
    name, config, settings, labels = HEADS[head]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()
    duplicate, original = copy.deepcopy(model), copy.deepcopy(model)
    plain, labelled = [{"input_ids": ids()}], [{"input_ids": ids(), "labels": labels}]
    quantize_(model, STATIC, calibration=labelled)
    quantize_(duplicate, STATIC, calibration=plain)
    assert_same(model, duplicate)
    assert {**model.config.to_dict(), "quantization_config": 0} == {**duplicate.config.to_dict(), "quantization_config": 0}
    assert doctor(model, original, labelled).to_dict() == doctor(duplicate, original, plain).to_dict()
    assert "_loss_function" not in model.__dict__
    if head == "language model":
        assert sensitivity(original, labelled, ["int4"]).to_dict() == sensitivity(original, plain, ["int4"]).to_dict()


def test_a_loss_of_the_users_own_is_there_afterwards():
    model = built("llama")
    model.loss_function = loss = transformers.loss.loss_utils.ForCausalLMLoss
    quantize_(model, STATIC, calibration=[{"input_ids": ids(), "labels": ids()}])
    assert model.loss_function is loss


class Needing(transformers.LlamaForCausalLM):
    """A user's class that cannot do without labels."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids=input_ids + labels)


def test_a_class_that_reads_labels_is_given_them(seen):  # noqa: F811
    torch.manual_seed(0)
    model = Needing(transformers.LlamaConfig(**TINY)).eval()
    check_statistics(model, [{"input_ids": ids(), "labels": torch.ones(2, 8, dtype=torch.long)}], seen)
