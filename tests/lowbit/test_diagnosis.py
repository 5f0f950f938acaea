"""The doctor: mistakes that were made on purpose are named, each in its place, and a healthy model gets a clean bill."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import SCHEMES, LayerConfig, QLinear, QTensor, doctor, quantize_
from lowbit.command import run
from lowbit.diagnosis.report import Diagnosis
from tests.support.models import exam_and_text, gpt2, llama, mlp, tokens, word_model

VICTIM = "model.layers.1.mlp.up_proj"
IDS = tokens(6, 20)


def quantized(model: nn.Module, what: Any = "int4_g32", **options: Any) -> Any:
    found = copy.deepcopy(model)
    quantize_(found, what, **options)
    return found


def only(found: Diagnosis, kind: str, layer: str) -> str:
    """What the one finding says."""
    assert [(finding.kind, finding.layer) for finding in found.findings] == [(kind, layer)], str(found)
    assert found.verdict == "bug"
    assert f"{layer}: " in str(found)
    return found.findings[0].description


# ---- healthy models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_gets_a_clean_bill(scheme):
    model = llama()
    found = doctor(quantized(model, scheme), model, IDS)
    assert found.verdict == "clean", str(found)
    for layer in found.layers:
        assert layer.weight_db == pytest.approx(layer.expected_db, abs=1e-3)
        assert layer.output_db == pytest.approx(layer.expected_output_db, abs=0.1)


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize(
    "what",
    [
        "gptq(int2_g32)", "gptq(int3)", "gptq(mxfp4)", "clip(int2_g32)", "hqq(int3_g32)", "gptq(nvfp4)",
        "int8_static_activation_int8_weight", "int8_dynamic_activation_int4_weight",
        {"*": "int4_g32", "*wte": "int8", "*embed_tokens": "int8", "lm_head": "int8"},
    ],
)  # fmt: skip
def test_every_method_gets_a_clean_bill(build, what):
    model = build()
    if isinstance(what, dict):
        tied = ["lm_head", "model.embed_tokens"] if build is llama else ["lm_head", "transformer.wte"]
        what = {**dict.fromkeys(tied, "int8"), "*": "int4_g32"}
    calibration = tokens(32, 24)
    healthy = quantized(model, what, calibration=calibration)
    for data in (None, IDS):
        found = doctor(healthy, model, data)
        assert found.verdict == "clean", str(found)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(4, 40), st.integers(4, 150)),
    scheme=st.sampled_from([*SCHEMES, "int4_g16", "int2_row", "uint3:g32:zfloat:fp16"]),
    rounder=st.sampled_from(["rtn", "clip", "hqq", "gptq"]),
    tail=st.sampled_from([3.0, 30.0]),
    seed=st.integers(0, 2**20),
)
def test_no_rounding_is_taken_for_a_mistake(shape, scheme, rounder, tail, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    model[0].weight.data = torch.distributions.StudentT(tail).sample(shape) * 0.05
    mixing = torch.randn(shape[1], shape[1]) * torch.randn(shape[1]).exp()
    x = torch.randn(256, shape[1]) @ mixing
    healthy = quantized(model, LayerConfig(lowbit.Scheme.parse(scheme), rounder=rounder), calibration=x)
    found = doctor(healthy, model, x)
    assert found.verdict != "bug", str(found)


@pytest.mark.parametrize("what", ["awq(int4_g32)", "smoothquant(int8)", "rotation(int4_g32)", "rotation(int4_g32, online=true)"])
def test_a_model_that_was_rewritten_is_judged_by_what_it_gives(what, tmp_path):
    model = llama()
    healthy = quantized(model, what, calibration=tokens(16, 24))
    found = doctor(healthy, model, IDS)
    assert found.rewritten
    assert found.verdict == "clean", str(found)
    assert "a rewrite changed the weights before they were rounded (KL 0.0" in str(found)
    assert all(layer.weight_db is None and layer.output_db is None for layer in found.layers)
    behind = copy.deepcopy(model)
    lowbit.rewrite_(behind, what, calibration=tokens(16, 24))
    beside = doctor(quantized(behind), behind, IDS)
    assert (beside.verdict, beside.rewritten) == ("clean", False)
    assert all(layer.output_db > layer.expected_output_db - 1 for layer in beside.layers)
    lowbit.save(healthy, tmp_path)
    again = lowbit.load(tmp_path)
    assert doctor(again, model, IDS, rewritten=True).verdict == "clean"
    if "online" not in what:
        assert [finding.kind for finding in doctor(again, model, IDS).findings if finding.kind != "tie"] == ["parameter"]
    again.get_submodule(VICTIM).weight.scale.data[0, 0] = math.inf
    kinds = [finding.kind for finding in doctor(again, model, IDS, rewritten=True).findings]
    assert set(kinds) == {"overflow"}


def test_the_figures_are_those_of_the_definition():
    model = mlp()
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    x[:, 7], x[:, 3] = 0, x[:, 3] * 50
    poor = quantized(model, "int3_g32")
    found = doctor(poor, model, x)
    first = found.layers[0]

    def db(wanted: Tensor, got: Tensor) -> float:
        wanted = wanted.detach().double()
        return 10 * math.log10(float(wanted.square().sum() / (got.detach().double() - wanted).square().sum()))

    assert first.weight_db == pytest.approx(db(model[0].weight, poor[0].weight.dequantize()))
    assert first.output_db == pytest.approx(db(model[0](x), poor[0](x)), abs=1e-3)
    assert found.layers[2].model_db == pytest.approx(db(model(x), poor(x)), abs=1e-3)
    assert (first.outlier_channel, first.dead_channels, first.rows) == (3, 1, 64)
    assert first.outlier > 20
    assert found.kl is not None  # what a model gives is taken for logits
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"] == "clean"
    lines = str(found).splitlines()
    assert len(lines) == 2 + len(found.layers)
    assert lines[-1].startswith("verdict: clean: ")


def test_clipped_weights_are_counted():
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    model[0].weight.data = torch.linspace(-1, 1, 512).reshape(8, 64)
    cut = quantized(model, "int8")
    cut[0].weight.scale.data = torch.full_like(cut[0].weight.scale, 0.5 / 127)
    assert doctor(cut, model).layers[0].clipped == pytest.approx(0.5, abs=0.01)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [None, IDS])
def test_a_dropped_bias(data):
    model = gpt2()
    model.transformer.h[1].mlp.c_fc.bias.data.normal_()
    broken = quantized(model)
    broken.transformer.h[1].mlp.c_fc.bias = None
    assert "its bias was dropped" in only(doctor(broken, model, data), "bias", "transformer.h.1.mlp.c_fc")
    broken.transformer.h[1].mlp.c_fc.bias = nn.Parameter(torch.ones(192), requires_grad=False)
    assert "its bias is another one" in only(doctor(broken, model, data), "bias", "transformer.h.1.mlp.c_fc")


def changed(layer: QLinear, codes: Callable[[Tensor], Tensor] | None = None, **parts: Callable[[Tensor], Tensor]) -> None:
    """Other codes, or other parts, in the weight that ``layer`` holds."""
    weight = layer.weight.canonical()
    held = {name: getattr(weight, name) for name in ("packed", "scale", "zero_point", "outer")}
    held.update({name: change(held[name].clone()) for name, change in parts.items()})
    if codes is not None:
        held["packed"] = lowbit.pack(codes(weight.codes()), bits=weight.scheme.bits)
    layer.weight = QTensor(*held.values(), weight.scheme, tuple(weight.shape), weight.dtype)


def turned(part: Tensor) -> Tensor:
    return part.T.contiguous().reshape(part.shape)


MISTAKES = {
    "the two halves of every byte are swapped": ("int4_g16", {"packed": lambda p: (p >> 4) | (p << 4)}),
    "two halves of every byte are swapped ": ("gptq(int4_g16)", {"packed": lambda p: (p >> 4) | (p << 4)}),
    "halves of every byte are swapped": ("int8", {"packed": lambda p: (p >> 4) | (p << 4)}),
    "the codes stand in every byte in the other order": (
        "int2_g16",
        {"packed": lambda p: ((p & 3) << 6) | ((p & 12) << 2) | ((p & 48) >> 2) | (p >> 6)},
    ),
    "the zero points are below what they should be by one": ("int4_g16", {"zero_point": lambda z: z.clamp(min=1) - 1}),
    "the zero points are above what they should be by one": ("gptq(int4_g16)", {"zero_point": lambda z: (z + 1).clamp(max=15)}),
    "the codes are read as two's complement": ("int4_sym_g16", {"codes": lambda c: c ^ 8}),
    "every weight has the other sign": ("fp8", {"codes": lambda c: c ^ 128}),
    "every weight is 4": ("nvfp4", {"outer": lambda o: o * 4}),
    "the scales lie in the order of their transpose": ("int4_g16", {"scale": turned, "zero_point": turned}),
    "the rows are in another order": ("int4_g16", {name: lambda p: p.roll(3, 0) for name in ("packed", "scale", "zero_point")}),
    "the columns are in another order": ("int4_row", {"codes": lambda c: c.roll(5, 1)}),
}


@pytest.mark.parametrize("data", [None, IDS])
@pytest.mark.parametrize("what", MISTAKES)
def test_what_is_wrong_with_a_whole_weight_is_found_by_undoing_it(what, data):
    scheme, change = MISTAKES[what]
    model = llama()
    if "scales" in what:  # which have to differ for their order to matter
        model.get_submodule(VICTIM).weight.data *= torch.linspace(-1.5, 1.5, 172).exp()[:, None]
    broken = quantized(model, scheme, calibration=tokens(32, 24))
    changed(broken.get_submodule(VICTIM), **change)
    said = only(doctor(broken, model, data), "codes", VICTIM)
    assert what.strip() in said, said
    assert "undoing that brings its weight from" in said


def test_a_transposed_weight():
    model, name = llama(), "model.layers.1.self_attn.q_proj"
    broken = quantized(model)
    layer = broken.get_submodule(name)
    layer.weight = QTensor.quantize(model.get_submodule(name).weight.detach().T, "int4_g32")
    assert "the weight is transposed" in only(doctor(broken, model, IDS), "codes", name)


@pytest.mark.parametrize("times", [2.0, 0.5])
@pytest.mark.parametrize("scheme", ["int3", "gptq(int4_g32)", "int8", "nvfp4", "mxfp4"])
def test_a_wrong_scale_in_one_group(scheme, times):
    model = llama()
    broken = quantized(model, scheme, calibration=tokens(32, 24))

    def one(scale: Tensor) -> Tensor:
        if scale.dtype == torch.uint8:  # codes of powers of two, or of e4m3: eight codes are a factor of 2
            scale[5, 0] += int(math.log2(times)) * (1 if scheme == "mxfp4" else 8)
        else:
            scale[5, 0] *= times
        return scale

    changed(broken.get_submodule(VICTIM), scale=one)
    said = only(doctor(broken, model), "scale", VICTIM)
    assert "the scale of 1 of " in said
    assert "group 0 of row 5" in said
    factor = float(said.partition("it is ")[2].partition(" times")[0])
    assert factor == pytest.approx(times, rel=0.25)


def test_a_wrong_zero_point_in_one_group():
    model = llama()
    broken = quantized(model)

    def one(zero: Tensor) -> Tensor:
        zero[5, 1] += 3
        return zero

    changed(broken.get_submodule(VICTIM), zero_point=one)
    assert "the zero point of 1 of 344 groups is wrong, the first is group 1 of row 5" in only(
        doctor(broken, model), "zero point", VICTIM
    )


def test_groups_that_were_lost():
    model = llama()
    broken = quantized(model)
    broken.get_submodule(VICTIM).weight.scale.data[3:5, 1] = 0
    found = doctor(broken, model, IDS)
    assert "2 of 344 groups mean zeros and should not, the first is group 1 of row 3" in only(found, "zero groups", VICTIM)
    assert next(layer for layer in found.layers if layer.name == VICTIM).zero_groups == 2


def test_zeros_that_were_zeros_are_no_loss():
    model = llama()
    model.get_submodule(VICTIM).weight.data[3, :32] = 0
    assert doctor(quantized(model), model, IDS).verdict == "clean"


@pytest.mark.parametrize("data", [None, IDS])
def test_an_untied_head(data):
    model = llama()
    for what in ("int4_g32", {"lm_head": "int8", "model.embed_tokens": "int8", "*": "int4_g32"}):
        broken = quantized(model, what)
        broken.lm_head = copy.deepcopy(broken.lm_head)
        said = only(doctor(broken, model, data), "tie", "lm_head")
        assert "it was tied to model.embed_tokens and is not any more" in said


def test_an_overflow_in_fp16():
    model = llama()
    up = model.get_submodule(VICTIM)
    up.weight.data *= 3e5  # the float model takes it
    broken = quantized(model, "int4_g32").half()
    found = doctor(broken, model, IDS)
    (finding,) = [finding for finding in found.findings if finding.kind == "overflow"]
    assert finding is found.findings[0]
    assert finding.layer == VICTIM
    assert "float16 ends at 65504" in finding.description
    assert finding.remedy == "Run it in bfloat16 or float32"
    assert doctor(quantized(model, "int4_g32"), model, IDS).verdict == "clean"


def test_scales_that_overflowed_as_stored():
    model = llama()
    broken = quantized(model)
    broken.get_submodule(VICTIM).weight.scale.data[0, 0] = math.inf
    found = doctor(broken, model)
    assert "32 of 11,008 weights are NaN or infinite as stored" in only(found, "overflow", VICTIM)


def test_something_else_that_changed():
    model = llama()
    broken = quantized(model)
    broken.model.layers[1].input_layernorm.weight.data *= 1.5
    said = only(doctor(broken, model, IDS), "parameter", "model.layers.1.input_layernorm")
    assert "model.layers.1.input_layernorm.weight is not quantized and is not what it is in the float model" in said
    assert doctor(quantized(model).bfloat16(), model).verdict == "clean"  # another dtype alone is no change


def test_a_kernel_that_computes_something_else(monkeypatch):
    model = llama()
    broken = quantized(model)
    layer = broken.get_submodule(VICTIM)
    right = layer.forward
    layer.forward = lambda x: right(x) * 1.2
    assert "its outputs are not the product" in only(doctor(broken, model, IDS), "arithmetic", VICTIM)


def test_weights_of_another_model():
    model, other = llama(), llama()
    other.get_submodule(VICTIM).weight.data.normal_(0, 0.02)
    broken = quantized(other)
    assert "its weight is no rounding of the float one" in only(doctor(broken, model), "codes", VICTIM)


def test_where_the_error_jumps():
    torch.manual_seed(0)
    model = llama()
    poor = quantized(model, {"model.layers.1.*": "int2_g32", "*": "int8"})
    found = doctor(poor, model, IDS)
    assert found.verdict == "clean"
    assert [name for name, _ in found.blocks] == ["model.layers.0", "model.layers.1"]
    assert found.jump is not None
    assert found.jump[0] == "model.layers.1"
    assert "the error grows most in model.layers.1" in str(found)
    assert all(layer.name.startswith("model.layers.1") for layer in found.worst)


# ---- what it cannot look at ------------------------------------------------------------------------------------------


def test_models_that_do_not_go_together():
    model = llama()
    healthy = quantized(model)
    for pair, message in [
        ((model, model), "no layer of the first model is quantized"),
        ((healthy, healthy), "is quantized in both models"),
        ((quantized(mlp()), model), "is in the quantized model alone"),
    ]:
        with pytest.raises(ValueError, match=message):
            doctor(*pair)
    with pytest.raises(ValueError, match="compared must be"):
        doctor(healthy, model, IDS, compared=0)
    model.lm_head.weight.data[3] = math.inf
    with pytest.raises(ValueError, match="the float model gives NaN or infinity"):
        doctor(healthy, model, IDS)


def test_both_models_stay_as_they_were():
    model = llama().train()
    healthy = quantized(model).train()
    doctor(healthy, model, IDS)
    assert all(module.training and not module._forward_hooks for m in (model, healthy) for module in m.modules())


def test_on_the_command_line(tmp_path, capsys):
    model, text = word_model(tmp_path / "model"), exam_and_text(tmp_path) / "text.txt"
    out, report = tmp_path / "out", tmp_path / "doctor.json"
    assert run(["quantize", str(model), "-r", "int4_g16", "-o", str(out)]) == 0
    capsys.readouterr()
    arguments = ["doctor", out, model, "--calibration", text, "--length", 16, "--report", report]
    assert run([*map(str, arguments)]) == 0
    assert "verdict: clean" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["verdict"] == "clean"
    assert found["layers"][0]["output_db"] > 15
    assert run(["doctor", str(out), str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["output_db"] is None
    for swapped, line in [
        ((model, out), "give the quantized model first"),
        ((out, out), "give the float model that it was made from"),
    ]:
        assert run(["doctor", *map(str, swapped)]) == 2
        assert line in capsys.readouterr().err
