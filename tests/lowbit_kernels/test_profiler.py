"""torch's profiler names the kernels of quantized products, and nothing of it is left where it does not run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lowbit import quantize_, trace_kernels


@pytest.mark.parametrize("recipe", ["int4", "nf4", "int8_dynamic_activation_int8_weight"])
@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("train", [False, True])
def test_ranges_are_named_after_the_kernels_that_run(recipe: str, m: int, train: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, recipe)
    x = torch.randn(m, 64, requires_grad=train)
    with trace_kernels() as trace:
        model(x)
    before = model(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        y = model(x)
    assert torch.equal(y, before)
    ranges = {event.key for event in profiled.key_averages()}
    assert {*trace.kernels()} <= ranges
    assert torch.equal(model(x), before)
