"""Writes into a QTensor and arithmetic on it: those of a float tensor, whose results are rounded where they are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from lowbit import QLinear, QTensor, Scheme
from lowbit_kernels.layouts import LAYOUTS
from tests.lowbit.test_tensor import FAMILIES, PROPERTY, make
from tests.support.strategies import schemes

N, K = 64, 96


def arranged(scheme: Scheme | str, layout: str, seed: int = 0, n: int = N, k: int = K) -> QTensor:
    q = make(scheme, n, k, seed=seed)
    try:
        return q.to_layout(layout)
    except ValueError:  # a layout that has no place for such groups
        return q


ways = st.sampled_from(sorted(LAYOUTS))
rows = st.tuples(st.integers(-N, N), st.integers(-N, N), st.integers(1, 3)).map(lambda t: slice(*t))


# ---- what is written is there ------------------------------------------------------------------------------------


@pytest.mark.works_with("torch", "copy_, slices that write through")
@PROPERTY
@given(schemes(), ways, ways, rows)
def test_codes_written_into_rows_are_the_tensors(scheme: Scheme, layout: str, other: str, where: slice) -> None:
    """Whatever the layouts: the rows that were written, and no others; or an error, and nothing."""
    q, source = arranged(scheme, layout), arranged(scheme, other, seed=1)
    wanted = q.dequantize()
    alias, seen, before = q.detach(), q[where], q.dequantize()
    wanted[where] = source.dequantize()[where]
    if scheme.outer and not torch.equal(q.outer, source.outer) and q[where].numel():
        with pytest.raises(ValueError, match="the outer of this slice scales values outside it too"):
            q[where].copy_(source[where])
        wanted = before
    else:
        q[where].copy_(source[where])
    for tensor in (q, alias):
        assert torch.equal(tensor.dequantize(), wanted)
    assert torch.equal(seen.dequantize(), wanted[where])


@pytest.mark.works_with("torch", "copy_, slices that write through")
@PROPERTY
@given(schemes(), ways, st.integers(0, 2), st.integers(1, 3))
def test_codes_written_into_columns(scheme: Scheme, layout: str, first: int, count: int) -> None:
    q, source = arranged(scheme, layout), arranged(scheme, layout, seed=1)
    where = (slice(None), slice(32 * first, min(32 * (first + count), K)))
    wanted, seen = q.dequantize(), q[where]
    with contextlib.suppress(ValueError):  # of what other columns are scaled by too
        q[where].copy_(source[where])
        wanted[where] = source.dequantize()[where]
    assert torch.equal(q.dequantize(), wanted)
    assert torch.equal(seen.dequantize(), wanted[where])


@PROPERTY
@given(schemes(), ways, st.sampled_from(("data", "copy_", "rows", "add_")))
def test_values_that_it_has_change_no_byte(scheme: Scheme, layout: str, way: str) -> None:
    q = arranged(scheme, layout)
    before, dense = q.clone(), q.dequantize()
    if way == "data":
        q.data = dense
    elif way == "copy_":
        q.copy_(dense)
    elif way == "rows":
        q[3:40] = dense[3:40]
    else:
        q.add_(torch.zeros_like(dense))
    assert torch.equal(q, before)
    assert q.byte_layout == before.byte_layout


@pytest.mark.works_with("torch", ".data, .data =")
@PROPERTY
@given(schemes(), ways)
def test_floats_are_rounded_to_nearest(scheme: Scheme, layout: str) -> None:
    new = torch.randn(N, K, generator=torch.Generator().manual_seed(5))
    for write in (lambda q: q.copy_(new), lambda q: setattr(q, "data", new), lambda q: q[:].copy_(new)):
        q = arranged(scheme, layout)
        write(q)
        assert torch.equal(q.dequantize(), QTensor.quantize(new, scheme).dequantize())


@pytest.mark.parametrize("scheme", FAMILIES, ids=str)
def test_only_the_groups_that_change_are_rounded_again(scheme: Scheme) -> None:
    q = make(scheme, 6, K)
    before, dense = q.dequantize(), q.dequantize()
    dense[2, 0] += 1
    q.copy_(dense)
    changed = (q.dequantize() != before).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {2} or scheme.outer


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("scheme", ["int8", "int4", "int3", "nf4", "mxfp4"])
def test_a_slice_of_a_slice_and_a_slice_that_is_kept(scheme: str, layout: str) -> None:
    q, new = arranged(scheme, layout), make(scheme, 4, K, seed=2)
    kept, inner = q[8:40], q[8:40][2:6]
    inner.copy_(new)
    for view, wanted in ((q[10:14], new), (kept[2:6], new), (q.t()[:, 10:14].t(), new)):
        assert torch.equal(view.dequantize(), wanted.dequantize())
    q[10] = make(scheme, 1, K, seed=3)[0]
    assert torch.equal(kept[2].dequantize(), make(scheme, 1, K, seed=3).dequantize()[0])
    assert torch.equal(inner[1:].dequantize(), new[1:].dequantize())


def test_what_two_slices_share_is_not_overwritten() -> None:
    for scheme, where in (
        ("nvfp4", (slice(0, 3),)),
        ("int4", (slice(None), slice(0, 40))),
        ("int8", (slice(None), slice(8, 16))),
    ):
        q, other = make(scheme, 6, K), make(scheme, 6, K, seed=1)
        before = q.clone()
        with pytest.raises(ValueError, match="of this slice scales values outside it too"):
            q[where].copy_(other[where])
        assert torch.equal(q, before)
    with pytest.raises(ValueError, match="cut a group of 128"):
        make("int4", 6, 256)[:, 64:].copy_(make("int4", 6, 256)[:, 64:])
    with pytest.raises(ValueError, match="holds 1 NaN"):
        make("int4", 2, 8)[:1] += torch.tensor([[torch.nan, *[0.0] * 7]])


@PROPERTY
@given(schemes(), ways, ways, st.sampled_from((0, 1)), st.booleans())
def test_a_weight_that_is_loaded_piece_by_piece_is_the_saved_one(
    scheme: Scheme, layout: str, other: str, dim: int, backward: bool
) -> None:
    """Whatever scales the pieces share, where they are whole groups."""
    assume(dim == 0 or scheme.group_size == -1 or 32 % scheme.group_size == 0)
    q, source = arranged(scheme, layout), arranged(scheme, other, seed=1)
    whole, cuts = q.__get_tensor_shard__(None), [slice(0, 32), slice(32, N if dim == 0 else K)]
    for cut in reversed(cuts) if backward else cuts:
        where = (slice(None),) * dim + (cut,)
        whole[where].copy_(source[where])
    assert torch.equal(q, source)
    assert torch.equal(q.dequantize(), source.dequantize())


# ---- a layer's weight ----------------------------------------------------------------------------------------------


@pytest.mark.works_with("torch", ".data, .data =")
@pytest.mark.parametrize("scheme", ["int8", "int4", "int3", "nf4", "nvfp4", "mxfp4", "fp8"])
def test_a_weight_that_is_changed_is_what_the_layer_multiplies_by(scheme: str) -> None:
    layer = QLinear(make(scheme, N, K))
    weight, x = layer.weight, torch.randn(3, K)
    delta = torch.randn(N, K) / 10
    for change in (
        lambda: setattr(layer.weight, "data", layer.weight.data + delta),
        lambda: layer.weight.data.add_(delta),
        lambda: layer.weight.data.__iadd__(delta),
        lambda: layer.weight.copy_(make(scheme, N, K, seed=4)),
        lambda: setattr(layer.weight, "data", make(scheme, N, K, seed=5)),
        lambda: torch._foreach_add_([layer.weight], [delta]),
        lambda: torch._foreach_lerp_([layer.weight], [delta], 0.5),
        lambda: layer.weight.data.__setitem__(slice(3, 9), layer.weight.data[3:9]),
    ):
        layer(x)
        with torch.no_grad():
            change()
        assert layer.weight is weight
        torch.testing.assert_close(layer(x), x @ layer.weight.dequantize().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.works_with("torch", ".data, .data =")
def test_data_of_another_dtype_device_or_scheme() -> None:
    layer = QLinear(make("int4", N, K), nn.Parameter(torch.randn(N)))
    weight = layer.weight
    weight.data = weight.data.half()
    assert (weight.dtype, layer.weight is weight, isinstance(weight, nn.Parameter)) == (torch.float16, True, True)
    weight.data = make("int8", N, K)
    assert str(weight.scheme) == "int8:row:bf16"
    weight.data = weight.data.to("meta")
    assert weight.device.type == "meta"
    with pytest.raises(ValueError, match=r"the data of a QTensor \(64, 96\) must have its shape, .* got \(64, 95\)"):
        weight.data = torch.zeros(N, K - 1)


@pytest.mark.works_with("torch", "requires_grad_")
def test_a_gradient_that_is_asked_for_is_refused_in_backward() -> None:
    for scheme in ("int4", "mxfp4", "nvfp4"):
        layer = QLinear(make(scheme, N, K), nn.Parameter(torch.zeros(N)))
        x = torch.randn(2, K)
        layer(x).sum().backward()
        for ask in (
            nn.Linear.requires_grad_,
            lambda m: setattr(m.weight, "requires_grad", True),
            lambda m: m.weight.requires_grad_(),
        ):
            ask(layer)
            assert layer.weight.requires_grad
            with pytest.raises(RuntimeError, match="a quantized weight has no gradient"):
                layer(x).sum().backward()
            layer.weight.requires_grad_(False)
            layer(x).sum().backward()
        with torch.no_grad():
            layer.requires_grad_()(x)


WRITES: list[Callable[[Tensor, Tensor], object]] = [
    lambda w, d: w.add_(d),
    lambda w, d: w.copy_(d),
    lambda w, d: w.mul_(d),
    lambda w, d: w.lerp_(d, 0.5),
    lambda w, d: w.addcmul_(d, d),
    lambda w, d: w[:8].copy_(d[:8]),
    lambda w, d: w.__setitem__(slice(8), d[:8]),
    lambda w, d: w.sub_(d),
]


@pytest.mark.parametrize("way", range(len(WRITES)))
def test_what_is_written_gets_no_gradient_and_backward_says_so(way: int) -> None:
    delta, x = torch.randn(N, K, requires_grad=True), torch.randn(2, K)
    for write in (False, True):
        weight = make("int4", N, K)
        before = weight.clone()
        if write:
            weight.requires_grad_(False)
            with torch.no_grad():
                WRITES[way](weight, delta)
            assert not torch.nn.functional.linear(x, weight).requires_grad
        else:
            WRITES[way](weight, delta)
            with pytest.raises(RuntimeError, match="a quantized weight has no gradient"):
                torch.nn.functional.linear(x, weight).sum().backward()
        assert not torch.equal(weight, before)
    layer = QLinear(make("int4", N, K))
    layer.weight.data += delta  # as adapters are merged
    layer(x.requires_grad_()).sum().backward()


# ---- arithmetic ----------------------------------------------------------------------------------------------------

PURE: list[Callable[[Tensor], object]] = [
    lambda w: w + 1,
    lambda w: 2 - w,
    lambda w: w * w,
    lambda w: w / 3,
    lambda w: -w,
    lambda w: w.abs().max(),
    lambda w: w.norm(dim=1),
    lambda w: torch.linalg.norm(w + 0.5, dim=1),
    lambda w: torch.linalg.svdvals(w.float()),
    lambda w: w.square().mean(0, keepdim=True),
    lambda w: w.isfinite().all(),
    lambda w: torch.where(w > 0, w, 0),
    lambda w: w.lerp(torch.ones(N, K), 0.5),
    lambda w: torch.allclose(w, w + 0),
    lambda w: w.sum().item(),
    lambda w: torch.ones(N, K).add_(w),
    lambda w: torch.zeros(N, K).copy_(w),
    lambda w: (w > 0).sum(),
]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("scheme", ["int4", "int3", "nvfp4"])
def test_arithmetic_is_that_of_the_dequantized_values(scheme: str, layout: str) -> None:
    q = arranged(scheme, layout)
    for function in PURE:
        torch.testing.assert_close(function(q), function(q.dequantize()))
        torch.testing.assert_close(function(nn.Parameter(q, requires_grad=False)), function(q.dequantize()))
    delta = torch.randn(N, K, requires_grad=True)
    torch.linalg.norm(q + 2 * delta, dim=1).sum().backward()
    (grad,) = torch.autograd.grad(torch.linalg.norm(q.dequantize() + 2 * delta, dim=1).sum(), delta)
    torch.testing.assert_close(delta.grad, grad)
