"""Models that are quantized already: every command says as what, and what to give instead, in the same words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

import lowbit
from lowbit.checkpoint.provenance import by_config, by_names
from lowbit.command import run
from lowbit.pretrained.float_folder import QuantizedError
from tests.lowbit.checkpoint.test_float_folders import commands
from tests.support.models import exam_and_text, tokens, word_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exam_and_text(word_model(tmp_path_factory.mktemp("whole")))


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "format": "gptq"},
        "gptq (4 bits, group_size 128)",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "awq (4 bits, group_size 64)"),
    "bitsandbytes nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes (4 bits, nf4)",
    ),
    "bitsandbytes int8": ({"load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes (8 bits)"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"]}}},
        "compressed-tensors (pack-quantized)",
    ),
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        "fp8 (e4m3, blocks of [128, 128])",
    ),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fbgemm_fp8"),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
    "hqq": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "hqq"),
    "quanto": ({"quant_method": "quanto", "weights": "int8", "activations": None}, "quanto (int8)"),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, "eetq (int8)"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "torchao"),
    "aqlm": ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "aqlm"),
    "vptq": ({"quant_method": "vptq", "config_for_layers": {}}, "vptq"),
    "spqr": ({"quant_method": "spqr", "bits": 3}, "spqr (3 bits)"),
    "higgs": ({"quant_method": "higgs", "bits": 4, "group_size": 256}, "higgs (4 bits, group_size 256)"),
    "bitnet": ({"quant_method": "bitnet", "linear_class": "autobitlinear"}, "bitnet"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (NVFP4)"),
    "a method of tomorrow": ({"quant_method": "tomorrow", "bits": 0.7}, "tomorrow"),
    "no method": ({"w_bit": 4, "q_group_size": 128}, "a method that its configuration does not name (4 bits, group_size 128)"),
    "lowbit": ({"quant_method": "lowbit", "version": 1}, "lowbit"),
}  # fmt: skip


def marked(whole: Path, folder: Path, config: dict[str, Any], key: str = "quantization_config", part: str = "") -> Path:
    """A copy of ``whole`` whose config.json says that it is quantized, perhaps in the configuration of a ``part``."""
    shutil.copytree(whole, folder)
    content = json.loads((folder / "config.json").read_text())
    content.update({part: {"model_type": "llama", key: config}} if part else {key: config})
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def said(capsys: pytest.CaptureFixture[str], arguments: list[Any]) -> str:
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(("config", "words"), METHODS.values(), ids=METHODS)
def test_every_command_says_the_same(config, words, whole, tmp_path, capsys):
    model = marked(whole, tmp_path / "model", config)
    ways = commands(model, whole, tmp_path / "out")
    lines = {name: said(capsys, ways[name]) for name in ways if "alone" not in name}
    (line,) = set(lines.values())
    assert line.startswith(
        f"lowbit: error: Invalid value: {model} is quantized already, as {words}: give the float model that it was"
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(QuantizedError) as found:
        lowbit.quantize_folder(model, tmp_path / "out", "int4", calibration=tokens(1, 8) % 48)
    assert line.endswith(str(found.value))


@pytest.mark.parametrize(("config", "words"), METHODS.values(), ids=METHODS)
def test_from_pretrained_refuses_to_quantize_it_again(config, words, whole, tmp_path):
    model = marked(whole, tmp_path / "model", config)
    with pytest.raises((ValueError, ImportError)) as found:
        transformers.AutoModelForCausalLM.from_pretrained(model, quantization_config=lowbit.Config("int4"))
    assert "\n" not in str(found.value).strip()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "damp_percent": 0.01}, "gptq (4 bits, group_size 128)"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}, "awq (4 bits, group_size 128)"),
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "modelopt (FP8)"),
    ],
)
def test_files_in_which_methods_describe_themselves(name, content, words, whole, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(whole, model)
    (model / name).write_text(json.dumps(content))
    assert f"{model} is quantized already, as {words}: give the float model" in said(capsys, ["plan", model])


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("part", ["", "text_config"])
def test_wherever_a_configuration_says_it(key, part, whole, tmp_path, capsys):
    config, words = METHODS["compressed-tensors"]
    model = marked(whole, tmp_path / "model", config, key, part)
    assert f"{model} is quantized already, as {words}" in said(capsys, ["plan", model])


@pytest.mark.parametrize("nothing", [None, {}, "fp8", []], ids=str)
def test_a_configuration_that_names_nothing(nothing, whole, tmp_path):
    assert by_config(marked(whole, tmp_path / "model", nothing)) is None
    assert by_config(tmp_path / "absent") is None


def test_what_transformers_turns_into_floats(whole, tmp_path, capsys):
    for method, kind in {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}.items():
        model = marked(whole, tmp_path / method, METHODS[method][0])
        assert f"quantization_config={kind}(dequantize=True), then save_pretrained" in said(capsys, ["plan", model])
        assert getattr(transformers, kind)(dequantize=True).dequantize


def test_names_of_float_tensors_tell_no_method():
    names = [
        "model.layers.0.mlp.up_proj.weight",
        "a.layer_scale",
        "blocks.0.bias",
        "transformer_blocks.0.norm",
        "packed_norm.weight",
    ]
    assert by_names(names) is None
    assert by_names([*names, "a.weight_scale_inv"]) == "fp8 in blocks"


def test_the_other_side_of_doctor(whole, tmp_path, capsys):
    model = marked(whole, tmp_path / "model", METHODS["gptq"][0])
    assert run(["quantize", str(whole), "-r", "int8", "-o", str(tmp_path / "quantized")]) == 0
    capsys.readouterr()
    assert "is quantized already, as gptq" in said(capsys, ["doctor", tmp_path / "quantized", model])
    assert f"{model} is no folder that lowbit quantize wrote" in said(capsys, ["doctor", model, whole])
