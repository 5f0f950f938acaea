"""Mixtures of experts of transformers: experts quantized in their own parameters, for every way in which a model runs them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import lowbit
from lowbit import QTensor, quantize_
from tests import ROOT
from tests.support.accuracy import linear_bound

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EIGHT: dict[str, Any] = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LOCAL: dict[str, Any] = {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}
ONE: dict[str, Any] = {**LOCAL, "num_experts_per_tok": 1, "head_dim": 16, "intermediate_size_mlp": 96}

# Class, configuration and its settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LOCAL),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EIGHT, "head_dim": 16}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**LOCAL, "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
            "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        },
    ),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", ONE),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", LOCAL),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", LOCAL),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", EIGHT),
}  # fmt: skip
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "lowbit")


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model, config, settings = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**settings, **changes}))
    with torch.no_grad():
        for parameter in made.parameters():  # some are made of zeros, or left as memory was
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    return made.to(dtype).eval()


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


def dense(model: nn.Module, quantized: nn.Module) -> nn.Module:
    """``model`` with the numbers that the weights of ``quantized`` stand for."""
    held = dict(quantized.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(held[name], QTensor):
                parameter.copy_(held[name].dequantize())
    return model


def experts_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 3}


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_quantized_with_the_linear_layers_and_routers_stay(name: str) -> None:
    model = build(name, torch.bfloat16)
    before = {n: (tuple(p.shape), p.nbytes) for n, p in model.named_parameters()}
    plan = quantize_(model, "int4")
    experts = experts_of(model)
    assert len(experts) >= 2
    assert all(isinstance(p, QTensor) and isinstance(p, nn.Parameter) for p in experts.values())
    assert all(tuple(p.shape) == before[n][0] for n, p in model.named_parameters())
    routers = [layer for layer in plan.skipped if "router" in layer.name or layer.name.endswith(("gate", "gate.weight"))]
    assert routers
    assert all(layer.reason for layer in routers)
    inside = [n for n in before if "embed" not in n and "lm_head" not in n]
    after = {n: p.nbytes for n, p in model.named_parameters()}
    assert sum(before[n][1] for n in inside) >= 3.5 * sum(after[n] for n in inside)
    entries = {layer.name: layer for layer in plan.quantized}
    for n, p in experts.items():
        assert entries[n].bytes_after == round(p.bits_per_weight * p.numel() / 8)
        assert entries[n].kind == "experts"


@pytest.mark.parametrize("scheme", ["int4", "nvfp4", "int3"])
@pytest.mark.parametrize("name", MODELS)
def test_every_implementation_computes_with_the_dequantized_weights(name: str, scheme: str) -> None:
    model = build(name)
    reference = copy.deepcopy(model)
    quantize_(model, scheme)
    decorated, own = name != "llama4", reference.config._experts_implementation
    assert model.config._experts_implementation == ("lowbit" if decorated else own)
    reference.config._experts_implementation = "eager"
    want = logits(dense(reference, model).double())
    for implementation in IMPLEMENTATIONS if decorated else (None,):
        if implementation is not None:
            model.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(model).double(), want, rtol=1e-4, atol=1e-4)


def same(model: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        assert not isinstance(parameter, QTensor) or parameter.byte_layout == theirs[name].byte_layout  # type: ignore[union-attr]
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("name", MODELS)
def test_files_bring_experts_back(name: str, tmp_path: Path) -> None:
    """save, load, save_pretrained and from_pretrained, whichever wrote the folder."""
    model = build(name, torch.bfloat16)
    quantize_(model, "int4")
    lowbit.save(model, tmp_path / "a")
    same(model, lowbit.load(tmp_path / "a"))
    same(model, lowbit.load(tmp_path / "a", build(name, torch.bfloat16)))
    loaded = type(model).from_pretrained(tmp_path / "a")
    same(model, loaded)
    assert loaded.config._experts_implementation == model.config._experts_implementation
    loaded.save_pretrained(tmp_path / "b")
    same(model, lowbit.load(tmp_path / "b"))


@pytest.mark.parametrize("name", MODELS)
def test_a_float_folder_is_quantized_while_it_loads_and_from_disk(name: str, tmp_path: Path) -> None:
    model = build(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    kind = type(model)
    want = kind.from_pretrained(tmp_path / "float").eval()
    plan = quantize_(want, "int4")
    got = kind.from_pretrained(tmp_path / "float", quantization_config=lowbit.Config("int4")).eval()
    assert got.hf_quantizer.plan == plan
    same(want, got)
    ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(2))
    done = lowbit.quantize_folder(tmp_path / "float", tmp_path / "disk", "int4", calibration=ids)
    assert done == plan
    same(want, lowbit.load(tmp_path / "disk"))


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (ROOT / "docs/experts.md").read_text()
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/experts.md", "exec"), {})


# ---- what rules take ---------------------------------------------------------------------------------------------


def test_a_pattern_of_a_module_leaves_its_biases_and_one_that_names_them_takes_them() -> None:
    model = build("gpt_oss")
    plan = lowbit.plan(model, {"*experts*": "int4", "*": "int8"})
    bits = {layer.name.partition("mlp.")[2]: layer.config and layer.config.weight.bits for layer in plan.layers}
    assert (bits["experts.gate_up_proj"], bits["experts.down_proj"]) == (4, 4)
    assert bits["experts.gate_up_proj_bias"] is bits["experts.down_proj_bias"] is bits["router.weight"] is None
    shapes = {layer.name.partition("mlp.")[2]: layer.shape for layer in plan.layers}
    assert shapes["experts.gate_up_proj"] == (8, 192, 64)  # [E, N, K], though the module has [E, K, N]
    named = lowbit.plan(model, {"*.router.weight": "int8", "re:gate_up_proj_bias$": "int8"})
    assert {layer.name.partition("mlp.")[2] for layer in named.quantized} == {"router.weight", "experts.gate_up_proj_bias"}
    quantize_(model, {"*.router.weight": "int8"})
    assert isinstance(model.model.layers[0].mlp.router.weight, QTensor)
    assert logits(model).isfinite().all()


def test_rules_that_quantize_nothing_are_named() -> None:
    model = build("mixtral")
    plan = lowbit.plan(model, {"*.gate.*": "int8", "*": "int4"})
    assert plan.notes == (
        "pattern '*.gate.*' quantizes nothing: model.layers.0.mlp.gate.weight (and 1 more) stays: "
        "a router: name it in a pattern to quantize it",
    )
    dense_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    assert [note for note in lowbit.plan(dense_model, "mixture_of_experts").notes if "experts" in note] == [
        r"pattern 're:\\.experts\\.' matches nothing in this model"
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_recipe_covers_experts(name: str) -> None:
    plan = lowbit.plan(build(name), "mixture_of_experts")
    bits = {layer.name: layer.config and layer.config.weight.bits for layer in plan.layers}
    experts = [found for layer, found in bits.items() if layer.endswith(("gate_up_proj", "down_proj")) and ".experts." in layer]
    assert set(experts) == {4}
    assert {found for layer, found in bits.items() if "router" in layer or "shared" in layer or ".gate." in layer} == {None}
    assert plan.notes == ()


def test_activations_of_experts_stay_and_the_plan_says_so() -> None:
    model = build("mixtral")
    plan = quantize_(model, "int8_dynamic_activation_int8_weight")
    entries = {layer.name: layer for layer in plan.quantized}
    experts, attention = entries["model.layers.0.mlp.experts.down_proj"], entries["model.layers.0.self_attn.q_proj"]
    assert attention.config is not None
    assert attention.config.activation is not None
    assert experts.config is not None
    assert experts.config.activation is None
    assert "its weight alone" in experts.reason


def test_what_is_kept_may_be_a_parameter() -> None:
    model = build("mixtral")
    plan = quantize_(model, lowbit.Recipe.of("int4").with_keep(["model.layers.0.mlp.experts"]))
    kept = [layer.name for layer in plan.skipped if "experts" in layer.name]
    assert kept == ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]


# ---- what is read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "lowbit"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
def test_only_experts_that_tokens_chose_are_read(name: str, implementation: str) -> None:
    model = build(name)
    quantize_(model, "int4")
    if name != "llama4":
        model.set_experts_implementation(implementation)
    moe = next(module for module in model.modules() if "experts" in module._modules)
    with lowbit.trace_kernels() as trace, torch.no_grad():
        moe(torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)))
    chosen = 1 if name == "llama4" else 2
    if implementation == "lowbit" and name != "llama4":  # one product for all of them
        assert trace.kernels() == {"cpu_experts_interleaved_split_int8x3_gemv": 2}
        return
    shapes = [(r.n, r.k) for r, count in trace.counts.items() for _ in range(count) if r.op == "linear"]
    assert shapes.count((192, 64)) == chosen
    assert shapes.count((64, 96)) == chosen + (name == "llama4")  # and its shared expert's
    assert "dequantize" not in {r.op for r in trace.counts}


def test_grouped_mm_takes_either_orientation_and_rows_of_nobody() -> None:
    w, x = torch.randn(4, 6, 32), torch.randn(9, 32)
    q = QTensor.quantize(w, "int8")
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    want = torch.cat([x[start:end] @ q[e].dequantize().t() for e, (start, end) in enumerate([(0, 2), (2, 2), (2, 5), (5, 8)])])
    y = torch.nn.functional.grouped_mm(x, q.transpose(1, 2), offs=ends)
    torch.testing.assert_close(y[:8], want)
    across = torch.nn.functional.grouped_mm(torch.ones(9, 6), q, offs=ends)
    torch.testing.assert_close(across[2:5], q[2].dequantize().sum(0).expand(3, 32))


# ---- training and moving -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by PEFT, of transformers
@pytest.mark.parametrize("name", MODELS)
def test_adapters_on_attention_are_trained_through_experts(name: str) -> None:
    """Their gradients are those of the dequantized model, for every implementation."""
    model = build(name)
    reference = copy.deepcopy(model)
    quantize_(model, "int4")
    dense(reference, model)
    implementations = IMPLEMENTATIONS if name != "llama4" else (None,)
    targets = ["q_a_proj", "o_proj"] if name == "deepseek_v3" else ["q_proj", "o_proj"]
    ids = torch.randint(3, 96, (1, 8), generator=torch.Generator().manual_seed(4))

    def gradients(base: Any, implementation: str | None) -> dict[str, Tensor]:
        if implementation is not None:
            base.set_experts_implementation(implementation)
        torch.manual_seed(5)
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        adapted.eval()(input_ids=ids, labels=ids).loss.backward()
        found = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
        adapted.unload()
        return found

    want = gradients(reference, None if name == "llama4" else "eager")
    assert want
    for implementation in implementations:
        got = gradients(model, implementation)
        assert got.keys() == want.keys()
        for parameter, gradient in want.items():
            torch.testing.assert_close(got[parameter], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_copies_casts_pickles_and_states_keep_experts(name: str, tmp_path: Path) -> None:
    model = build(name)
    quantize_(model, "int4")
    same(model, copy.deepcopy(model))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = build(name)
    quantize_(other, "int4")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2.0)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    same(model, other)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    for n, p in experts_of(narrow).items():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p.dequantize(torch.float32), model.get_parameter(n).dequantize())
    assert logits(narrow).isfinite().all()


# ---- methods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["gptq(int4)", "awq(int4)", "clip(int4)", "hqq(int4)"])
def test_plans_say_what_methods_make_of_experts(recipe: str) -> None:
    model = build("gpt_oss")
    ids = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(6))
    planned = [layer for layer in lowbit.plan(model, recipe).quantized if layer.kind == "experts"]
    done = [layer for layer in quantize_(model, recipe, calibration=ids).quantized if layer.kind == "experts"]
    wanted = lowbit.Recipe.of(recipe).rules[0].config
    for before, after in zip(planned, done, strict=True):
        assert before.config == after.config == wanted
        assert before.reason == after.reason
        assert ("leaves what it reads as it is" in after.reason) == ("awq" in recipe)
        assert after.loss is not None
        assert ("reached" in " ".join(after.notes)) == (recipe in ("gptq(int4)", "clip(int4)"))  # by 4 * 16 tokens


def test_single_parameters_are_rounded_without_data_and_the_plan_says_so() -> None:
    model = build("mixtral")
    name = "model.layers.0.mlp.gate.weight"
    w = model.get_parameter(name).detach().clone()
    ids = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(6))
    plan = quantize_(model, {"*.gate.weight": "gptq(int8)", "*": "gptq(int4)"}, calibration=ids)
    (layer,) = [layer for layer in plan.quantized if layer.name == name]
    assert "needs statistics" in layer.reason
    assert any("rounded without" in note for note in layer.notes)
    assert torch.equal(model.get_parameter(name), QTensor.quantize(w, "int8", method="mse"))


def test_sensitivity_leaves_the_model_as_it_was_and_doctor_takes_experts_for_no_bug() -> None:
    model = build("mixtral")
    held = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    ids = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(6))
    found = lowbit.sensitivity(model, ids, ["int4", "int8"])
    assert all(p is held[n][0] and torch.equal(p, held[n][1]) for n, p in model.named_parameters())
    experts = {n for n in held if n.endswith(("gate_up_proj", "down_proj"))}
    costs = {layer.names[0]: layer for layer in found.layers}
    assert experts <= costs.keys()
    for n in experts:
        assert costs[n].weights == held[n][0].numel()
        assert costs[n].costs["int4"].kl is not None
    quantized = copy.deepcopy(model)
    quantize_(quantized, lowbit.allocate(found, bits=6.0, by="kl"))
    assert isinstance(experts_of(quantized)["model.layers.0.mlp.experts.down_proj"], QTensor)
    assert [f for f in lowbit.doctor(quantized, model, ids).findings if "experts" in f.layer] == []


# ---- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int4", "int8", "int3", "mxfp4", "nf4"])
@pytest.mark.parametrize("biased", [True, False])
def test_products_with_all_experts_run_on_a_row_of_the_cpu_that_reads_the_chosen(scheme: str, biased: bool) -> None:
    """The weights of the others are NaN: a result that is a number has not read them."""
    generator = torch.Generator().manual_seed(0)
    w = QTensor.quantize(torch.randn(8, 64, 128, generator=generator), scheme)
    x = torch.zeros(8, 3, 128)
    x[2, 1], x[5] = torch.randn(128, generator=generator), torch.randn(3, 128, generator=generator)
    bias = torch.randn(8, 64, generator=generator) if biased else None
    wide, dense = x.double(), w.dequantize().double()
    shift = None if bias is None else bias[:, None].double()
    want = wide @ dense.mT + (0 if shift is None else shift)
    unread = [e for e in range(8) if e not in (2, 5)]
    scale = w.scale.clone()
    if scale.is_floating_point():
        scale[unread] = torch.nan
    parts = (w.packed, scale, w.zero_point, w.outer, bias, str(w.scheme), w.byte_layout)
    with lowbit.trace_kernels() as trace:
        y = torch.ops.lowbit.grouped_linear(x, *parts)
    (ran,) = trace.counts
    assert ran.kernel.startswith("cpu_grouped")
    assert bool(((y.double() - want).abs() <= linear_bound(ran.contract, wide, dense, shift, want, x.dtype)).all())


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def run_of_experts(module: Any, tokens: int, implementation: str) -> Tensor:
    """What ``module`` makes of random tokens that chose two experts each, the last expert seldom."""
    generator = torch.Generator().manual_seed(tokens)
    weight = next(module.parameters())
    x = torch.randn(tokens, 64, generator=generator).to(weight.device, weight.dtype)
    chosen = torch.stack([torch.randperm(7, generator=generator)[:2] for _ in range(tokens)])
    chosen[0, 0] = 7
    shares = torch.rand(tokens, 2, generator=generator).to(x)
    module.config._experts_implementation_internal = implementation
    with torch.no_grad():
        return module(x, chosen.to(x.device), shares)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int4", "int8", "int3", "nf4", "fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_on_a_gpu_are_as_exact_as_products_with_their_dequantized_weights(
    name: str, scheme: str, dtype: torch.dtype
) -> None:
    """The error is at most twice that of torch's products with the same weights in the same dtype."""
    model = build(name, dtype).cuda()
    quantize_(model, {"*experts*": scheme})
    module: Any = next(m for m in model.modules() if any(isinstance(p, QTensor) for p in m._parameters.values()))
    reference = copy.deepcopy(module)
    for leaf, parameter in reference._parameters.items():
        if isinstance(parameter, QTensor):
            reference._parameters[leaf] = nn.Parameter(parameter.dequantize(torch.float64), requires_grad=False)
    exact = reference.double()
    rounded = copy.deepcopy(reference).to(dtype)
    for tokens in (1, 3, 40, 700):
        with lowbit.trace_kernels() as trace:
            y = run_of_experts(module, tokens, "lowbit")
        assert all("experts" in kernel for kernel in trace.kernels()) == (2 * tokens <= 8), trace
        want = run_of_experts(exact, tokens, "eager")
        bound = 2 * (run_of_experts(rounded, tokens, "eager").double() - want).abs().max()
        assert bool(((y.double() - want).abs() <= bound).all()), tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_graph_captures_experts(tokens: int) -> None:
    model = build("qwen3_moe", torch.bfloat16).cuda()
    quantize_(model, {"*experts*": "int4"})
    module: Any = next(m for m in model.modules() if any(isinstance(p, QTensor) for p in m._parameters.values()))
    module.config._experts_implementation_internal = "lowbit"
    x, shares = torch.randn(tokens, 64, device="cuda").bfloat16(), torch.rand(tokens, 2, device="cuda").bfloat16()
    chosen = torch.zeros(tokens, 2, dtype=torch.long, device="cuda")
    chosen[:, 1] = 1
    with torch.no_grad():
        module(x, chosen, shares)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x, chosen, shares)
        for seed in range(3):  # other experts in each replay
            chosen.copy_(torch.randint(0, 9, chosen.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(y, module(x, chosen, shares))
