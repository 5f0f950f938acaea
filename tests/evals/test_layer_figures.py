"""Signal over noise, histograms and bytes of quantized layers against numpy in float64 and the files that are written."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lowbit import QTensor, Scheme, quantize_, save
from lowbit.evals import layers as measured
from lowbit.evals.layers import float_weights, histogram, layer_figures, size_of, sqnr
from lowbit.scheme import SCHEMES
from tests.support import models, oracle, strategies


def quantized(model: torch.nn.Module, what: object) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    before = float_weights(model)
    quantize_(model, what)
    return model, before


def rounded(w: torch.Tensor, scheme: Scheme) -> QTensor:
    try:
        return QTensor.quantize(w, scheme)
    except ValueError:  # scales that the scheme's own format cannot hold
        reject()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_in(folder: Path) -> dict[str, int]:
    found = {"codes": 0, "scales": 0, "float": 0}
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            tensor, last = file.get_tensor(name), name.rsplit(".", 1)[-1]
            kind = {"scale": "scales", "zero_point": "scales", "outer": "scales"}.get(last, "float")
            kind = "codes" if tensor.dim() == 3 else kind
            found[kind] += tensor.nbytes
    return found


@pytest.mark.parametrize("what", [None, "int4", "int3_g64", "nvfp4", "mxfp4", {"*embed*": "int8", "*": "int5"}])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_those_of_the_file(what: object, tied: bool, tmp_path: Path) -> None:
    model = models.llama(tied)
    if what is not None:
        quantize_(model, what)
    save(model, tmp_path)
    assert size_of(model) == bytes_in(tmp_path)
    assert (size_of(model)["codes"] > 0) == (what is not None)


def test_a_model_that_is_a_layer(tmp_path: Path) -> None:
    wrapped = torch.nn.Sequential(torch.nn.Linear(40, 6))
    quantize_(wrapped, "int4")
    save(wrapped[0], tmp_path)
    assert size_of(wrapped[0]) == bytes_in(tmp_path)


# ---- signal over noise -----------------------------------------------------------------------------------------------


@given(strategies.weights(largest=1000.0), strategies.schemes())
@settings(max_examples=30)
def test_sqnr_is_the_definition(w: torch.Tensor, scheme: Scheme) -> None:
    weight = rounded(w, scheme)
    dense = weight.dequantize(torch.float64).numpy()
    with np.errstate(divide="ignore"):
        want = oracle.sqnr(w.numpy(), dense) if (w.double().numpy() != dense).any() else np.inf
    assert sqnr(w, weight) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_nothing_depends_on_how_rows_are_divided(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(10, 70, generator=torch.Generator().manual_seed(0))
    weight = QTensor.quantize(w, "int3_g64")
    whole, spread = sqnr(w, weight), histogram(w, weight)
    monkeypatch.setattr(measured, "_BLOCK", 70 * rows)
    assert sqnr(w, weight) == pytest.approx(whole, rel=1e-12)
    assert {**histogram(w, weight), "edges": None} == {**spread, "edges": None}


def test_figures_of_a_model() -> None:
    model, before = quantized(models.llama(), {"*embed*": "int8", "*lm_head*": "int8", "*down*": "int2", "*": "int4"})
    seen: list[tuple[int, int]] = []
    layers, histograms = layer_figures(model, before, progress=lambda *done: seen.append(done))
    # The head shares the embedding's weight: one layer.
    assert len(layers) == len({layer["name"] for layer in layers}) == 15
    assert seen[-1] == (15, 15)
    for layer in layers:
        weight = model.get_submodule(layer["name"]).weight
        assert layer["scheme"] == str(weight.scheme)
        assert layer["bits_per_weight"] == weight.bits_per_weight
        assert layer["sqnr_db"] == pytest.approx(
            oracle.sqnr(before[layer["name"]].double().numpy(), weight.dequantize(torch.float64).numpy()), rel=1e-9
        )
    assert [h["name"] for h in histograms] == [layers[i]["name"] for i in (0, 7, 14)]
    assert json.loads(json.dumps([layers, histograms], allow_nan=False)) == [layers, histograms]
    assert layer_figures(model, before, drawn=0)[1] == []
    assert len(layer_figures(model, before, drawn=1)[1]) == 1
    assert len(layer_figures(model, before, drawn=99)[1]) == 15


def test_weights_that_are_stored_transposed() -> None:
    model, before = quantized(models.gpt2(), "int4_g32")
    layers, _ = layer_figures(model, before)
    assert len(layers) == 8
    assert all(15 < layer["sqnr_db"] < 30 for layer in layers)


def test_layers_that_nothing_is_known_of() -> None:
    model, before = quantized(models.mlp(), "int4")
    layers, histograms = layer_figures(model, {"4": before["4"]})
    assert [layer["sqnr_db"] is None for layer in layers] == [True, True, False]
    assert [h["name"] for h in histograms] == ["4"]
    assert layer_figures(models.mlp(), before) == ([], [])
    with pytest.raises(ValueError, match=r"0: the float weight is \(5, 33\) and the quantized one \(70, 40\)"):
        layer_figures(model, {"0": before["4"]})


def test_weights_that_lost_nothing() -> None:
    w = torch.tensor([[-127.0, 5, 127], [0, 3, -128]])
    assert sqnr(w, QTensor.quantize(w, "int8")) == float("inf")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False))
    model[0].weight.data = w
    quantized_model, before = quantized(model, "int8")
    assert layer_figures(quantized_model, before)[0][0]["sqnr_db"] is None


# ---- histograms ------------------------------------------------------------------------------------------------------


@given(strategies.weights(largest=1000.0), strategies.schemes(), st.integers(1, 90))
@settings(max_examples=30)
def test_a_histogram_is_numpys(w: torch.Tensor, scheme: Scheme, bins: int) -> None:
    weight = rounded(w, scheme)
    found = histogram(w, weight, bins)
    edges = np.array(found["edges"])
    assert len(edges) == bins + 1
    assert (np.diff(edges) > 0).all()
    for side, values in (("before", w), ("after", weight.dequantize(torch.float64))):
        inside = np.clip(values.double().numpy(), edges[0], edges[-1])
        assert found[side] == np.histogram(inside, edges)[0].tolist()
        assert sum(found[side]) == w.numel()
    assert found["grid"] == sorted(found["grid"])
    assert len(found["grid"]) <= 256


@pytest.mark.parametrize("name", SCHEMES)
def test_the_grid_is_where_weights_are(name: str) -> None:
    """Of a weight whose groups all have one scale, every quantized number is one of the grid."""
    w = torch.randn(1, 128, generator=torch.Generator().manual_seed(1)).repeat(8, 2)
    scheme = SCHEMES[name].replace(group_size=128)
    weight = QTensor.quantize(w, scheme)
    found = histogram(w, weight)
    grid = np.array(found["grid"])
    values = np.unique(weight.dequantize(torch.float64).numpy())
    nearest = np.abs(values[:, None] - grid[None]).min(1)
    assert nearest.max() <= 1e-6 * np.abs(grid).max()


def test_outliers_leave_the_others_their_bins() -> None:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    w[3, 5], w[9, 9] = 4000, -2500
    found = histogram(w, QTensor.quantize(w, "int4_g32"))
    assert found["edges"][-1] - found["edges"][0] < 200
    assert found["before"][-1] >= 1
    assert found["before"][0] >= 1
    with_all = histogram(w.clamp(-3, 3), QTensor.quantize(w.clamp(-3, 3), "int4_g32"))
    assert sum(count > 0 for count in with_all["before"]) > 60
