"""What transformers keeps when it quantizes stays as it is here too, in memory and through Config alike, with a reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowbit
from lowbit import Config, QLinear, Recipe, quantize_
from lowbit.recipe import name_matches
from tests.ecosystem.test_architectures import CODER, GROUPED, MODELS, SMALL, VISION, build, output

BY_NAME = "name it in a pattern to quantize it"
T5: dict[str, Any] = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 2, "decoder_start_token_id": 0}


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def reasons(plan: lowbit.plans.Plan) -> dict[str, str]:
    return {layer.name: layer.reason for layer in plan.skipped}


def both(kind: type, folder: Path, what: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The model in ``folder`` quantized in memory, and while it is loaded, by the same plan."""
    in_memory = kind.from_pretrained(folder, **options)
    expected = lowbit.plan(in_memory, what)
    assert quantize_(in_memory, what) == expected
    while_loading = kind.from_pretrained(
        folder, quantization_config=what if isinstance(what, Config) else Config(what), **options
    )
    found = while_loading.hf_quantizer.plan
    assert [str(layer) for layer in found.layers] == [str(layer) for layer in expected.layers]
    assert found == expected
    assert all(layer.reason for layer in found.skipped)
    return in_memory, while_loading


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_one_plan_in_memory_and_while_it_is_loaded(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    in_memory, while_loading = both(type(model), tmp_path, "int4", dtype=torch.float16)
    assert {n: p.dtype for n, p in in_memory.named_parameters()} == {n: p.dtype for n, p in while_loading.named_parameters()}
    assert torch.equal(output(name, in_memory.to(torch.float32)), output(name, while_loading.to(torch.float32)))


# ---- float32 ---------------------------------------------------------------------------------------------------


def t5(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**T5, "num_layers": layers})).eval()


def answer(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, decoder_input_ids=ids).logits.float()


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def dense(model: nn.Module) -> nn.Module:
    """The float32 model that ``model``, a quantized one, stands for."""
    duplicate = t5()
    for name, module in duplicate.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = model.get_submodule(name).weight
            module.weight.data = (weight.dequantize() if isinstance(weight, lowbit.QTensor) else weight.detach()).float()
        elif "weight" in module._parameters:
            module.weight.data = model.get_submodule(name).weight.detach().float()
    return duplicate


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("what", ["int8", {"*wo": "int8", "*": "int8"}], ids=["everything", "by name"])
def test_wo_of_t5_stays_or_is_quantized_for_float32(what, dtype, tmp_path):
    """Its inputs may exceed what float16 holds, so that transformers keeps it in float32 there."""
    model = t5()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("wo.weight"):
                parameter *= 1e6  # more than float16 holds
    model.save_pretrained(tmp_path)
    rounded = type(model).from_pretrained(tmp_path, dtype=dtype)
    rounding = apart(answer(rounded), answer(model))
    for found in both(type(model), tmp_path, what, dtype=dtype):
        wo = [module for name, module in found.named_modules() if name.endswith(".wo")]
        assert len(wo) == 4
        assert {module.weight.dtype for module in wo} == {torch.float32 if dtype == torch.float16 else dtype}
        assert {type(module) for module in wo} == {nn.Linear if what == "int8" else QLinear}
        assert {module.weight.dtype for name, module in found.named_modules() if name.endswith(".wi")} == {dtype}
        # The dtype costs the quantized model what it costs the float one, in which products are rounded as often.
        assert apart(answer(found), answer(dense(found))) < 2 * rounding + 1e-6
    if what == "int8":
        why = reasons(found.hf_quantizer.plan)["encoder.block.0.layer.1.DenseReluDense.wo"]
        assert why == f"wo in transformers' _keep_in_fp32_modules: {BY_NAME}"


def test_a_folder_read_in_another_dtype_keeps_them_too(tmp_path):
    model = t5()
    quantize_(model, {"*block.1.*wo": "int8", "*wi": "int8", "*": None})
    lowbit.save(model, tmp_path)
    found = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    dtypes = {name: module.weight.dtype for name, module in found.named_modules() if name.endswith((".wo", ".wi"))}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("wo")} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("wi")} == {torch.float16}
    assert apart(answer(found), answer(model)) < 0.01


def test_from_disk_to_disk_they_are_what_the_loaded_model_has(tmp_path):
    t5(1).half().save_pretrained(tmp_path / "in")
    ids = torch.arange(3, 11)[None]
    data, recipe = [{"input_ids": ids, "decoder_input_ids": ids}], {"*wo": "int8", "*": "int4"}
    carried = lowbit.quantize_folder(tmp_path / "in", tmp_path / "out", recipe, calibration=data)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "in", dtype="auto")
    assert quantize_(model, recipe, calibration=data) == carried
    lowbit.save(model, tmp_path / "memory")
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "memory")]
    assert written[0] == written[1]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_lists_of_a_class_are_read_whatever_is_in_them(strict, dtype, tmp_path, monkeypatch):
    cls = transformers.LlamaForCausalLM
    attribute = "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules"
    monkeypatch.setattr(cls, attribute, ["mlp.down_proj.weight", "layers.0.*q_proj"])
    cls(transformers.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    _, while_loading = both(cls, tmp_path, "int8", dtype=dtype)
    kept = {name for name, why in reasons(while_loading.hf_quantizer.plan).items() if attribute in why}
    assert kept == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    assert {p.dtype for n, p in while_loading.named_parameters() if n.removesuffix(".weight") in kept} == {
        torch.float32 if dtype == torch.float16 or (strict and dtype == torch.bfloat16) else dtype
    }


# ---- heads -----------------------------------------------------------------------------------------------------

BART = {**CODER, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "pad_token_id": 0}
# A base model, the class that puts a head on it, and the layers of that head.
HEADS: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("LlamaForCausalLM", "LlamaForSequenceClassification", GROUPED, {"score"}),
    ("LlamaModel", "LlamaForTokenClassification", GROUPED, {"score"}),
    ("LlamaModel", "LlamaForQuestionAnswering", GROUPED, {"qa_outputs"}),
    ("BertModel", "BertForSequenceClassification", SMALL, {"classifier"}),
    ("BertModel", "BertForMultipleChoice", SMALL, {"classifier"}),
    ("BertForMaskedLM", "BertForQuestionAnswering", SMALL, {"qa_outputs"}),
    ("RobertaModel", "RobertaForSequenceClassification", SMALL, {"classifier.dense", "classifier.out_proj"}),
    ("GPT2Model", "GPT2ForSequenceClassification", GPT2, {"score"}),
    ("BartModel", "BartForSequenceClassification", BART, {"classification_head.dense", "classification_head.out_proj"}),
    ("T5ForConditionalGeneration", "T5ForTokenClassification", T5, {"classifier"}),
    ("ViTModel", "ViTForImageClassification", VISION, {"classifier"}),
]


@pytest.mark.parametrize(("base", "kind", "settings", "head"), HEADS, ids=[head[1] for head in HEADS])
def test_a_head_that_no_file_had_is_made_and_stays_float(base, kind, settings, head, tmp_path):
    config = getattr(transformers, getattr(transformers, base).config_class.__name__)(**settings)
    getattr(transformers, base)(config).save_pretrained(tmp_path)
    torch.manual_seed(3)
    for model in both(getattr(transformers, kind), tmp_path, "int8"):
        for name in head:
            layer = model.get_submodule(name)
            assert type(layer) is nn.Linear
            assert layer.weight.isfinite().all()
            assert layer.weight.std() > 0
            assert layer.weight.requires_grad
    why = reasons(model.hf_quantizer.plan)
    assert {name: why[name] for name in head} == dict.fromkeys(head, f"a head: {BY_NAME}")
    assert model.hf_quantizer.plan.quantized


def test_blocks_and_models_beside_the_base_model_are_no_heads():
    decoder = {"decoder_hidden_size": 32, "decoder_intermediate_size": 48, "decoder_num_hidden_layers": 2}
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**VISION, **decoder, decoder_num_attention_heads=2))
    plan = lowbit.plan(model, "int8")
    assert len([layer for layer in plan.quantized if layer.name.startswith("decoder.decoder_layers.")]) == 12
    assert {"decoder.decoder_embed", "decoder.decoder_pred"} <= {name for name, why in reasons(plan).items() if "a head" in why}
    beside = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    beside.tower = transformers.BertModel(transformers.BertConfig(**SMALL))
    names = {layer.name for layer in lowbit.plan(beside, "int8").quantized}
    assert {name.replace("bert.", "tower.") for name in names if name.startswith("bert.")} <= names
    assert "classifier" not in names


def test_a_head_that_a_pattern_names_is_quantized(tmp_path):
    transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    for model in both(transformers.BertForSequenceClassification, tmp_path, {"classifier": "int8", "*": "int4"}):
        assert model.classifier.scheme == lowbit.SCHEMES["int8"]


def test_a_model_within_another_module_keeps_the_same():
    whole = nn.ModuleDict({"tower": build("t5"), "head": nn.Linear(8, 8)})
    inside = lowbit.plan(whole["tower"], "int8")
    plan = lowbit.plan(whole, "int8")
    assert {layer.name for layer in plan.quantized} == {"head", *(f"tower.{layer.name}" for layer in inside.quantized)}
    assert reasons(plan) == {f"tower.{name}": why.replace("tied to ", "tied to tower.") for name, why in reasons(inside).items()}


def test_rules_for_everything_leave_what_is_tied_to_something_that_they_leave():
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "out": nn.Linear(8, 16, bias=False), "up": nn.Linear(8, 8)})
    model["out"].weight = model["embed"].weight
    assert reasons(lowbit.plan(model, "int8")) == {
        "embed": f"an embedding: {BY_NAME}", "out": f"tied to embed, an embedding: {BY_NAME}",
    }  # fmt: skip
    assert len(lowbit.plan(model, {"out": "int8", "*": "int4"}).quantized) == 3


# ---- modules_to_not_convert ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name", "found"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", True),
        ("model.layers.*", "model.layers.11.mlp.up_proj", True),
        (r"model\.layers\.\d+\.mlp", "model.layers.3.mlp.up_proj", True),
        ("mlp", "model.layers.1.mlp.up_proj", False),
        ("mlp.gate", "mlp.gate_proj", False),
        ("up_proj", "model.layers.1.mlp.up_proj", True),
        ("proj", "model.layers.1.mlp.up_proj", True),
        ("a|b", "b.c", True),
    ],
)
def test_names_are_read_as_transformers_reads_them(key, name, found):
    assert name_matches(key, name) == found


@pytest.mark.parametrize("keep", [["model.layers.0"], ["up_proj", "down_proj"], [r"model\.layers\.\d+\.self_attn", "lm_head"]])
def test_modules_to_not_convert_stay(keep, tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    kind = transformers.LlamaForCausalLM
    config = Config({"lm_head": "int8", "*": "int8"}, modules_to_not_convert=keep)
    _, found = both(kind, tmp_path, config)
    stay = {name for name, why in reasons(found.hf_quantizer.plan).items() if why.startswith("modules_to_not_convert has ")}
    assert stay
    assert stay == {name for name, module in found.named_modules() if type(module) is nn.Linear}
    assert stay == {layer.name for layer in found.hf_quantizer.plan.layers if any(name_matches(key, layer.name) for key in keep)}
    assert config.modules_to_not_convert == keep


def test_a_configuration_goes_through_json_a_dict_and_a_folder(tmp_path):
    config = Config("int4", modules_to_not_convert=["lm_head", "mlp.up_proj", "lm_head"])
    assert config.recipe == Recipe.of("int4").with_keep(["lm_head", "mlp.up_proj"])
    assert Config.from_dict(json.loads(config.to_json_string())).recipe == config.recipe == copy.deepcopy(config).recipe
    plain = {"quant_method": "lowbit", "recipe": "int4", "modules_to_not_convert": ["lm_head", "mlp.up_proj"]}
    assert Config.from_dict(plain).recipe == config.recipe
    assert Recipe.from_text(config.recipe.to_yaml()) == config.recipe
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).save_pretrained(tmp_path / "float")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float", quantization_config=plain)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    model.save_pretrained(tmp_path / "quantized")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "quantized")
    assert type(again.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(again.model.layers[0].mlp.gate_proj) is QLinear


def test_names_that_mean_nothing_are_refused(tmp_path):
    kind = transformers.LlamaForCausalLM
    kind(transformers.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"'lmhead' is to be kept and names no module or parameter of the model; the nearest are lm_head"
    ):
        kind.from_pretrained(tmp_path, quantization_config=Config("int4", modules_to_not_convert=["lmhead"]))
    with pytest.raises(ValueError, match=r"'\(' in what is kept is neither a name nor a regular expression"):
        Config("int4", modules_to_not_convert=["("])
    with pytest.raises(TypeError, match="stand in a list, got 'lm_head'"):
        Config("int4", modules_to_not_convert="lm_head")
    with pytest.raises(ValueError, match="keep must be a list such as"):
        Recipe.from_text("rules: [{match: '*', weight: int4}]\nkeep: lm_head")
    with pytest.raises(ValueError, match="and the recipe 'int4' keeps a"):
        Recipe.of({"*": Recipe.of("int4").with_keep(["a"])})
    tied = kind(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True))
    with pytest.raises(ValueError, match="share one weight"):
        lowbit.plan(tied, Recipe.of({"*embed_tokens": "int8", "*": "int4"}).with_keep(["lm_head"]))
