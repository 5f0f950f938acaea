"""Rotation of the residual stream: the same output on every architecture that has one, and an error that names why elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowbit
from lowbit import QLinear, Recipe, quantize_
from lowbit.calibration.data import Batch
from lowbit.rewrites.hadamard import Rotation
from lowbit.rewrites.norms import measure_norm
from lowbit.rewrites.residual_stream import find_residual_stream
from lowbit.rewrites.rotation import rotation
from lowbit.transforms import Hadamard, RMSNorm, TransformedLinear

SAME = 1e-5  # of the largest output: rounding in float32
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2: dict[str, Any] = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}

# Class, configuration and its settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama with a tied head": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "llama of an odd width": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "hidden_size": 42, "num_attention_heads": 1,
                                                                  "num_key_value_heads": 1, "intermediate_size": 66}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 16}),
    "phi": ("PhiForCausalLM", "PhiConfig", GROUPED),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SMALL, "bos_token_id": 1, "eos_token_id": 2}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SMALL, "ffn_dim": 112, "word_embed_proj_dim": 64, "pad_token_id": 0}),
    "opt with projections": ("OPTForCausalLM", "OPTConfig", {**SMALL, "ffn_dim": 112, "word_embed_proj_dim": 32,
                                                             "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**GROUPED, "num_experts": 4, "moe_intermediate_size": 64,
                                                            "shared_expert_intermediate_size": 48}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**GROUPED, "head_dim": 16, "num_local_experts": 4,
                                                      "num_experts_per_tok": 2}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}),
}  # fmt: skip
PASSED_BY: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "head_dim": 16},
        "post_.*layernorm is a norm whose output is added",
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL, "attention.output.LayerNorm reads what .* give together"),
    "no head": ("LlamaModel", "LlamaConfig", GROUPED, "needs a model whose output a layer computes"),
}
ONLINE = ("llama", "llama of an odd width", "gemma", "opt", "gpt2", "phi", "qwen2_moe")


def build(name: str, plain: bool = False) -> Any:
    """A random model; its norms have gains and biases of their own unless ``plain``."""
    kind, config, given = (MODELS.get(name) or PASSED_BY[name])[:3]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**given)).eval()
    for path, parameter in model.named_parameters():
        if not plain and (parameter.dim() == 1 or path.endswith("bias")):
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


def ids(rows: int = 3, length: int = 20) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(ids())
    return (found.logits if hasattr(found, "logits") else found[0]).double()


def differs(model: nn.Module, want: Tensor) -> float:
    return float((logits(model) - want).abs().max() / want.abs().max())


# ---- the same output -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_rotated_model_gives_what_it_gave_and_every_weight_of_its_stream_is_another(name: str, plain: bool) -> None:
    model = build(name, plain)
    want, before = logits(model), copy.deepcopy(model)
    rotation(model, [])
    assert differs(model, want) <= SAME
    stream = find_residual_stream(before, Batch((), {"input_ids": ids()}))
    for path in stream.readers.keys() | stream.writers.keys():
        old, new = before.get_submodule(path), model.get_submodule(path)
        for leaf, parameter in old.named_parameters():
            if parameter.dim() > 1 and stream.width in parameter.shape and bool(parameter.any()):
                changed = (new.get_parameter(leaf) - parameter).detach()
                assert float(changed.norm()) > 0.5 * float(parameter.detach().norm()), (path, leaf)
    for path in stream.norms:
        found = measure_norm(model.get_submodule(path), stream.width)
        assert found is not None
        assert found.is_plain
        assert not found.centres


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_transform_stands_before_each_down_projection_alone(name: str) -> None:
    model = build(name)
    want = logits(model)
    rotation(model, [], online=True)
    assert differs(model, want) <= SAME
    found = [path for path, module in model.named_modules() if isinstance(module, Hadamard)]
    assert len(found) == 2
    assert all(path.endswith(("down_proj.transform", "fc2.transform", "mlp.c_proj.transform")) for path in found)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sixteen_bits_are_rotated_as_float32_is_and_then_rounded(name: str) -> None:
    wide = build(name).bfloat16().float()
    narrow = copy.deepcopy(wide).bfloat16()
    rotation(wide, [], online=True)
    rotation(narrow, [], online=True)
    want = dict(wide.named_parameters())
    for path, parameter in narrow.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, want[path].bfloat16())


def test_the_seed_decides_and_nothing_else_does() -> None:
    found = []
    for seed in (0, 0, 1):
        model = build("llama")
        torch.manual_seed(seed + 7)
        rotation(model, [], seed=seed)
        found.append(model.lm_head.weight)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_weights_are_those_of_the_formula() -> None:
    model = build("gpt2")
    before = copy.deepcopy(model)
    rotation(model, [], seed=3)
    q = Rotation.of(48, 3).apply(torch.eye(48, dtype=torch.float64))
    centre = torch.eye(48, dtype=torch.float64) - 1 / 48
    old, new = before.transformer.h[1], model.transformer.h[1]
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(new.mlp.c_proj.weight.double(), old.mlp.c_proj.weight.double() @ centre @ q, **close)
    torch.testing.assert_close(new.mlp.c_proj.bias.double(), old.mlp.c_proj.bias.double() @ centre @ q, **close)
    read = (old.ln_1.weight.double()[:, None] * old.attn.c_attn.weight.double()).T @ centre @ q
    torch.testing.assert_close(new.attn.c_attn.weight.double(), read.T, **close)
    bias = old.attn.c_attn.bias.double() + old.ln_1.bias.double() @ old.attn.c_attn.weight.double()
    torch.testing.assert_close(new.attn.c_attn.bias.double(), bias, **close)


# ---- heads, biases, norms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama with a tied head", "gpt2", "opt", "gemma"])
def test_a_tied_head_stays_tied_where_the_last_norm_has_no_gain_and_the_plan_says_where_not(name: str, tmp_path: Path) -> None:
    plain, own = build(name, plain=True), build(name)
    quiet, spoken = rotation(plain, []), rotation(own, [])
    assert plain.lm_head.weight is plain.get_input_embeddings().weight
    assert not [note for note in quiet if "lm_head" in note]
    assert own.lm_head.weight is not own.get_input_embeddings().weight
    assert [note for note in spoken if note.startswith("lm_head.weight is no longer that of") and "has a gain" in note]
    want = logits(own)
    own.tie_weights()  # as transformers does it whenever it pleases
    assert torch.equal(logits(own), want)
    quantize_(own, "int8")
    lowbit.save(own, tmp_path)
    assert torch.equal(logits(lowbit.load(tmp_path)), logits(own))


def test_a_layer_norm_makes_way_for_a_norm_that_is_seen_and_a_bias_goes_to_the_head() -> None:
    model = build("gpt2")
    notes = rotation(model, [])
    assert all(isinstance(block.ln_1, RMSNorm) and block.ln_1.eps == 1e-5 for block in model.transformer.h)
    assert isinstance(model.lm_head, TransformedLinear)
    assert model.lm_head.bias is not None
    assert [note for note in notes if "RMS norms now" in note]
    assert [note for note in notes if note.startswith("lm_head has a bias now")]


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("recipe", [None, "int8", "int8_dynamic_activation_int8_weight"])
def test_a_rotated_model_comes_back_from_files(name: str, recipe: str | None, tmp_path: Path) -> None:
    model = build(name)
    if recipe is None:
        lowbit.rewrite_(model, lowbit.rotation("int4", online=True))
    else:
        quantize_(model, lowbit.rotation(recipe, online=True))
    lowbit.save(model, tmp_path)
    assert torch.equal(logits(lowbit.load(tmp_path)), logits(model))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    for written in (again, model):
        written.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(lowbit.load(tmp_path / "again")), logits(model))


# ---- experts ---------------------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.down_proj = nn.Linear(24, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Two of ``experts`` linear experts a token, mixed as a router says; ``look`` is a way to look past the norm."""

    def __init__(self, width: int, experts: int, look: str) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, experts)
        self.experts, self.look = nn.ModuleList(Expert(width) for _ in range(experts)), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        share, chosen = self.router(y).softmax(-1).topk(2)
        added = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slot = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                added.index_add_(0, rows, expert(y[rows]) * share[rows, slot, None])
        if self.look == "mask":  # which autograd does not see
            added = added * (x[..., :1] > 0)
        if self.look == "gate":
            added = added * torch.sigmoid(x)
        return x + added


class Mixture(nn.Module):
    def __init__(self, width: int = 20, experts: int = 6, look: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.layers = nn.ModuleList(Block(width, experts, look) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.normal_(module.weight, 1, 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_linear_experts_are_rotated_also_those_that_no_token_reached() -> None:
    model, tokens = Mixture(), torch.arange(50)
    with torch.no_grad():
        want = model(tokens)
    before = copy.deepcopy(model)
    notes = rotation(model, [Batch((tokens[:2],), {})], online=True)  # two tokens reach four experts at most
    with torch.no_grad():
        assert float((model(tokens) - want).abs().max() / want.abs().max()) <= SAME
    assert [note for note in notes if "reached by no data" in note]
    for old, new in zip(before.layers, model.layers, strict=True):
        for a, b in zip(old.experts, new.experts, strict=True):
            assert isinstance(b.down_proj, TransformedLinear)
            assert not torch.allclose(a.up_proj.weight, b.up_proj.weight)


# ---- in a recipe -----------------------------------------------------------------------------------------------------


def test_a_recipe_says_rotation_in_python_in_yaml_and_on_the_command_line() -> None:
    found = lowbit.rotation(lowbit.gptq("int3"), online=True, seed=2)
    assert Recipe.parse("rotation(gptq(int3), online=true, seed=2)").rewrites == found.rewrites
    assert Recipe.from_text(found.to_yaml()) == found


def test_rotation_evens_out_channels_that_stand_out_and_rounding_hurts_less() -> None:
    def outlying() -> Any:
        model = build("llama")
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 5] *= 30
            for layer in model.model.layers:
                for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
                    proj.weight[:, 5] /= 30
        return model

    want = logits(outlying())
    lost = []
    for recipe in (lowbit.int8_dynamic_activation_int8_weight(), lowbit.rotation("int8_dynamic_activation_int8_weight")):
        model = outlying()
        plan = quantize_(model, recipe)
        lost.append(float((logits(model) - want).square().mean()))
        assert isinstance(model.model.layers[0].mlp.up_proj, QLinear)
    assert plan.notes[0].startswith("rotation: 64 channels of the residual stream are rotated by Hadamard matrices 64")
    assert lost[1] < 0.5 * lost[0]


def test_gptq_behind_rotation_calibrates_on_rotated_inputs() -> None:
    model = build("llama")
    want = logits(model)
    plan = quantize_(model, lowbit.rotation(lowbit.gptq("int8"), online=True), calibration=ids(8))
    assert all(layer.loss is not None and layer.loss < 1e-3 for layer in plan.quantized)
    assert differs(model, want) < 0.05
