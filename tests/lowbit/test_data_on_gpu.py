"""A model that is on a CUDA device looks at data that is not: calibrating, rewriting, measuring and diagnosing it there."""

from __future__ import annotations

import copy

import pytest
import torch

import lowbit
from lowbit import quantize_
from lowbit.quantize import rewrite_
from tests.support.models import gpt2, llama, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),  # autograd's thread
]
IDS = tokens(4, 12)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("what", ["gptq(int4)", "gptq(int3, asymmetric=true)", "clip(nf4)", "awq(int4)", "awq(gptq(int4))"])
def test_it_is_quantized_as_on_a_cpu(make, what):
    model = make()
    duplicate = copy.deepcopy(model).cuda()
    expected, plan = quantize_(model, what, calibration=IDS), quantize_(duplicate, what, calibration=IDS)
    for layer, reference in zip(plan.quantized, expected.quantized, strict=True):
        assert duplicate.get_submodule(layer.name).weight.is_cuda
        assert layer.loss == pytest.approx(reference.loss, rel=0.2)  # other roundings of a tie lead to other weights


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("what", ["rotation(int4)", "awq(int4)", "smoothquant(int8_dynamic_activation_int8_weight)"])
def test_a_rewrite_keeps_what_it_gives(make, what):
    model = make().cuda()
    with torch.no_grad():
        before = model(IDS.cuda()).logits
        rewrite_(model, what, calibration=IDS)
        assert all(parameter.is_cuda for parameter in model.parameters())
        assert (model(IDS.cuda()).logits - before).abs().max() <= 1e-5 * before.abs().max()


def test_sensitivity_and_diagnosis_are_those_of_a_cpu():
    model = llama()
    duplicate = copy.deepcopy(model).cuda()
    here, there = (lowbit.sensitivity(m, IDS, ["int3_g32", "int4_g32"], compared=2) for m in (model, duplicate))
    for a, b in zip(here.layers, there.layers, strict=True):
        assert a.name == b.name
        for scheme, cost in a.costs.items():
            assert b.costs[scheme].kl == pytest.approx(cost.kl, rel=0.05, abs=1e-7)
    quantized = copy.deepcopy(duplicate)
    quantize_(quantized, "int4_g32")
    assert not lowbit.doctor(quantized, duplicate, IDS).findings
