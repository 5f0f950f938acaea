"""A format that the library has never heard of is one line of data, and everything works with it."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit import FORMATS, Float, LayerConfig, QTensor, Scheme, quantize_
from tests.support.models import mlp


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(FORMATS, "fp5_e1m3", Float("fp5_e1m3", exponent=1, mantissa=3))  # the one line
    return FORMATS["fp5_e1m3"]


def test_it_quantizes_saves_loads_and_multiplies(made_up, tmp_path):
    scheme = Scheme("fp5_e1m3", 32)
    assert (made_up.bits, scheme.bits, made_up.max) == (5, 5, 15 / 8 * 2)
    w, x = torch.randn(24, 100), torch.randn(3, 100)
    q = QTensor.quantize(w, scheme)
    assert q.packed.shape == (24, 63)  # ceil(100 * 4 / 8) + ceil(100 / 8)
    assert q.error(w).sqnr_db > 20
    torch.testing.assert_close(torch.nn.functional.linear(x, q), x @ q.dequantize().t())

    model = mlp()
    plan = quantize_(model, {"*": LayerConfig(scheme)})
    assert all(layer.config.weight == scheme for layer in plan.quantized)
    lowbit.save(model, tmp_path)
    again = lowbit.load(tmp_path, model=mlp())
    x = torch.randn(2, 40)
    assert torch.equal(again(x), model(x))
    assert torch.equal(again[0].weight, model[0].weight)


def test_its_name_is_a_scheme_under_an_exponent_scale(made_up):
    w = torch.randn(8, 64)
    q = QTensor.quantize(w, Scheme(made_up, 32, scale="e8m0"))
    assert torch.equal(QTensor.quantize(q.dequantize(), q.scheme).codes(), q.codes())


def test_a_format_that_is_not_registered_says_how(tmp_path):
    with pytest.raises(ValueError, match=r"register it with FORMATS\['fp5_e1m3'\]"):
        Scheme(Float("fp5_e1m3", 1, 3), 32)
    with pytest.raises(ValueError, match="did you mean"):
        Scheme("fp5_e1m3", 32)
