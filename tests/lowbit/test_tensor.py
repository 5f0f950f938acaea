"""QTensor: slicing, joining and turning commute with dequantizing, for every scheme, and the edges say what is wrong."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import QTensor, Scheme
from lowbit.packing import pack, plane_widths
from lowbit_kernels import layouts

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
NAMES = (
    *("int8", "int7", "int6", "int5", "int4", "int3", "int2", "int1", "int4_sym", "ternary", "nf4", "fp8", "fp8_e5m2"),
    *("fp6", "fp6_e3m2", "fp5", "fp4", "mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4"),
)
FAMILIES = (
    *(Scheme.parse(name) for name in NAMES),
    Scheme("uint4", 16, zero_point="float"),
    Scheme("uint3", 16, zero_point="float", scale="fp32"),
    Scheme("int5", 16, scale="fp16"),
)
schemes = st.builds(
    lambda scheme, group: scheme.replace(group_size=group), st.sampled_from(FAMILIES), st.sampled_from((-1, 1, 3, 8, 16, 48))
)
lengths = st.sampled_from((1, 0, 2, 7, 16, 24, 40, 67))


def make(scheme: Scheme | str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> QTensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.25
    return QTensor.quantize(w.to(dtype), scheme)


@st.composite
def qtensors(draw: st.DrawFn, dims: tuple[int, ...] = (2, 3)) -> QTensor:
    lead = [draw(st.integers(0, 3)) for _ in range(draw(st.sampled_from(dims)) - 2)]
    q = make(draw(schemes), *lead, draw(st.integers(0, 5)), draw(lengths), seed=draw(st.integers(0, 9)))
    return q.transpose(-1, -2) if draw(st.booleans()) else q


def align(q: QTensor) -> int:
    return 8 // min(plane_widths(q.scheme.bits))


def along_k(q: QTensor) -> int:
    return -2 if q.transposed else -1


def along_n(q: QTensor) -> int:
    return -1 if q.transposed else -2


def same(q: object, expected: Tensor) -> None:
    """``q`` is a sound QTensor that stands for ``expected``, bit for bit."""
    assert isinstance(q, QTensor)
    assert q.shape == expected.shape == q.codes().shape
    assert torch.equal(q.dequantize(), expected)
    stored = q.codes().transpose(-1, -2) if q.transposed else q.codes()
    assert torch.equal(q.packed, pack(stored, q.scheme.bits))  # so padding bits are zero
    assert q.scale.shape == (*stored.shape[:-1], q.scheme.groups(stored.shape[-1]) if stored.shape[-1] else 0)
    assert q.scale.dtype == q.scheme.scale_dtype
    assert (q.zero_point is None) == (q.scheme.zero_point == "none")
    if q.zero_point is not None:
        assert (q.zero_point.shape, q.zero_point.dtype) == (q.scale.shape, q.scheme.zero_point_dtype)
    assert (q.outer is None) != q.scheme.outer
    if q.outer is not None:
        assert q.outer.shape == stored.shape[:-2]
    assert q.nbytes == sum(t.nbytes for t in (q.packed, q.scale, q.zero_point, q.outer) if t is not None)


# ---- making ----------------------------------------------------------------------------------------------------


@PROPERTY
@given(schemes, st.sampled_from(((1, 1), (3, 7), (0, 5), (4, 0), (0, 0), (2, 3, 9), (0, 2, 8), (2, 1, 3, 5), (2, 0, 3, 0))))
def test_every_shape_survives(scheme: Scheme, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        q = make(scheme, *shape, dtype=dtype)
        assert q.dtype == dtype
        same(q, q.dequantize())
        same(q.transpose(-1, -2), q.dequantize().transpose(-1, -2))


@PROPERTY
@given(schemes)
def test_rounding_again_to_more_bits_is_close(scheme: Scheme) -> None:
    q = make(scheme, 6, 48)
    wide = Scheme("int8", 16, scale="fp32")
    for tensor in (q, q.t()):
        again = tensor.requantize(wide)
        assert (again.scheme, again.dtype, again.shape) == (wide, q.dtype, tensor.shape)
        assert again.error(tensor.dequantize()).max_error <= float(q.dequantize().abs().max()) / 253  # half a step of 254
        same(again, again.dequantize())
    assert q.error(q.dequantize(torch.float64)) == (math.inf, 0.0)
    assert q.t().error(torch.zeros(48, 6)).sqnr_db == -math.inf


def test_bits_and_bytes() -> None:
    q = make("int4", 8, 1024)
    assert q.bits_per_weight == 4 + (16 + 4) / 128
    assert q.zero_point is not None
    assert q.zero_point.dtype == torch.uint8
    assert q.nbytes == 8 * (512 + 8 * 2 + 8)
    assert make("nvfp4", 8, 1024).bits_per_weight == 4 + 8 / 16 + 32 / 8192
    assert "uint4:g128:zint:bf16" in repr(q)
    assert "transposed" in repr(q.t())
    assert q.dequantize(torch.float16).dtype == torch.float16


# ---- slices ----------------------------------------------------------------------------------------------------


@PROPERTY
@given(st.data(), qtensors((2, 3, 4)))
def test_rows_and_matrices_slice(data: st.DataObject, q: QTensor) -> None:
    dense = q.dequantize()
    k = along_k(q) % q.dim()
    dim = data.draw(st.sampled_from([d for d in range(q.dim()) if d != k]))
    where = data.draw(st.slices(q.shape[dim]).filter(lambda s: (s.step or 1) > 0))
    index = (*[slice(None)] * dim, where)
    same(q[index], dense[index])
    same(q[..., where] if dim == q.dim() - 1 else q[(*index, ...)], dense[index])
    start, stop, _ = where.indices(q.shape[dim])
    if start <= stop:
        same(q.narrow(dim - q.dim(), start, stop - start), dense.narrow(dim, start, stop - start))


@PROPERTY
@given(st.data(), qtensors((2, 3, 4)))
def test_gathered_rows(data: st.DataObject, q: QTensor) -> None:
    dense = q.dequantize()
    dim = data.draw(st.sampled_from([d for d in range(q.dim()) if d != along_k(q) % q.dim()]))
    size = q.shape[dim]
    before = (slice(None),) * dim
    if size:
        rows = data.draw(st.lists(st.integers(-size, size - 1), max_size=6))
        if rows:
            same(q[(*before, rows)], dense[(*before, rows)])
        index = torch.tensor(rows, dtype=torch.int64)
        same(q[(*before, index)], dense[(*before, index)])
        same(q.index_select(dim, index % size), dense.index_select(dim, index % size))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    same(q[(*before, mask)], dense[(*before, mask)])
    with pytest.raises(IndexError):
        q[(*before, torch.ones(size + 1, dtype=torch.bool))]


@PROPERTY
@given(st.data(), qtensors((2, 3, 4)))
def test_single_rows_and_matrices(data: st.DataObject, q: QTensor) -> None:
    dense = q.dequantize()
    dim = data.draw(st.sampled_from([d for d in range(q.dim()) if d != along_k(q) % q.dim()]))
    if not q.shape[dim]:
        return
    index = data.draw(st.integers(-q.shape[dim], q.shape[dim] - 1))
    if q.outer is not None and q.dim() > 2 and dim == along_n(q) % q.dim():
        with pytest.raises(ValueError, match="outer scale: dequantize first"):
            q.select(dim, index)
        return
    one = q.select(dim, index)
    same(one, dense.select(dim, index))
    pieces = q.unbind(dim)
    assert len(pieces) == q.shape[dim]
    assert torch.equal(pieces[index].dequantize(), dense.select(dim, index))
    if one.dim() == 1:
        assert torch.equal(one.t().dequantize(), one.dequantize())
        assert torch.equal(one[..., : align(q)].dequantize(), one.dequantize()[: align(q)])


@PROPERTY
@given(st.data(), qtensors())
def test_k_slices_on_byte_bounds(data: st.DataObject, q: QTensor) -> None:
    dense, dim = q.dequantize(), along_k(q)
    k = q.shape[dim]
    bounds = st.sampled_from(sorted({*range(0, k + 1, align(q)), k}))
    start, stop = data.draw(bounds), data.draw(bounds)
    if start == k and k % align(q):
        start = 0
    if start <= stop:
        same(q.narrow(dim, start, stop - start), dense.narrow(dim, start, stop - start))
    cut = (..., slice(start, stop)) if dim == -1 else (..., slice(start, stop), slice(None))
    back = (..., slice(start - k or None, stop)) if dim == -1 else (..., slice(start - k or None, stop), slice(None))
    same(q[cut], dense[cut])
    same(q[back], dense[back])
    middle = q[cut]
    if start < stop and q.scheme.group_size != -1:
        assert q.scheme.group_size % middle.scheme.group_size == 0
        assert start % middle.scheme.group_size == 0


@PROPERTY
@given(st.data(), qtensors())
def test_k_slices_elsewhere_say_where(data: st.DataObject, q: QTensor) -> None:
    k, a = q.shape[along_k(q)], align(q)
    if a == 1 or k < a + 2:
        return
    start = data.draw(st.integers(0, k - 2))
    stop = data.draw(st.integers(start + 1, k))
    if start % a or (stop % a and stop != k):
        with pytest.raises(ValueError, match=rf"multiples of {a}, got {start}:{stop}; the nearest is "):
            q.narrow(along_k(q), start, stop - start)
    same(q.narrow(along_k(q), start, 0), q.dequantize().narrow(along_k(q), start, 0))


@PROPERTY
@given(st.data(), qtensors())
def test_split_and_cat_are_inverse(data: st.DataObject, q: QTensor) -> None:
    dense = q.dequantize()
    for dim in range(q.dim()):
        size = q.shape[dim]
        unit = 1
        if dim == along_k(q) % q.dim():
            unit = math.lcm(align(q), q.scheme.group_size) if q.scheme.group_size > 0 else max(size, 1)
        piece = unit * data.draw(st.integers(1, 3))
        parts = q.split(piece, dim)
        for part, expected in zip(parts, dense.split(piece, dim), strict=True):
            same(part, expected)
        same(torch.cat(parts, dim - q.dim()), dense)
        sizes = [min(piece, size), size - min(piece, size)]
        for part, expected in zip(q.split(sizes, dim), dense.split(sizes, dim), strict=True):
            same(part, expected)
        if unit == 1:
            for part, expected in zip(q.chunk(3, dim), dense.chunk(3, dim), strict=True):
                same(part, expected)
            for part, expected in zip(q.tensor_split(3, dim), dense.tensor_split(3, dim), strict=True):
                same(part, expected)
    for dim in (0, -3, q.dim() - 2):
        same(torch.stack([q, q], dim), torch.stack([dense, dense], dim))


@PROPERTY
@given(qtensors((2, 3, 4)))
def test_turning_twice_is_nothing(q: QTensor) -> None:
    dense, last = q.dequantize(), list(range(q.dim()))
    turned = [*last[:-2], last[-1], last[-2]]
    for view in (q.mT, q.transpose(-2, -1), q.swapaxes(-1, -2), q.permute(turned), *((q.t(), q.T) if q.dim() == 2 else ())):
        assert torch.equal(view.dequantize(), dense.mT)
        assert view.stride() == tuple(q.stride(d) for d in turned)
        assert torch.equal(view, q.mT)
        same(view.mT, dense)
    same(q.transpose(0, 0), dense)
    same(q.permute(last), dense)
    same(q.view(q.shape), dense)
    same(q.expand(q.shape), dense)


# ---- copies and moves ------------------------------------------------------------------------------------------


@PROPERTY
@given(qtensors((2, 3, 4)))
def test_copies_hold_the_same_and_share_nothing(q: QTensor) -> None:
    dense = q.dequantize()
    for other in (q.clone(), copy.deepcopy(q), q.to(q.dtype, copy=True), q.contiguous().clone()):
        same(other, dense)
        assert torch.equal(other, q)
        assert all(not part.numel() or part.data_ptr() != q._parts()[name].data_ptr() for name, part in other._parts().items())
    for view in (q.detach(), q.data, q.cpu(), q.to(q.device), q[...]):
        same(view, dense)
        assert view.packed.data_ptr() == q.packed.data_ptr()
    other = torch.empty_like(q)
    other.copy_(q)
    same(other, dense)
    meta = q.to("meta")
    assert meta.device.type == meta.packed.device.type == "meta"
    assert meta.dequantize().shape == q.shape
    assert torch.empty_like(meta, device="cpu").packed.shape == q.packed.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_that_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    q = make("nvfp4", 3, 40)
    for moved in (q.to(dtype), q.type(dtype), q.to(torch.empty(0, dtype=dtype))):
        assert moved.dtype == moved.dequantize().dtype == dtype
        assert all(torch.equal(part, q._parts()[name]) for name, part in moved._parts().items())
    assert (q.half().dtype, q.float().dtype, q.double().dtype) == (torch.float16, torch.float32, torch.float64)
    assert q.to("meta", dtype).dequantize().dtype == dtype


def test_writing_into_rows() -> None:
    q, other = make("int4", 4, 20), make("int4", 4, 20, seed=1)
    q[0:2] = other[2:4]
    q[3] = other[0]
    assert torch.equal(q[0:2], other[2:4])
    assert torch.equal(q[3], other[0])
    assert not torch.equal(q, make("int3", 4, 20))
    assert q.share_memory_().is_shared()
    assert not other.is_shared()


@pytest.mark.gpu
def test_pinned_and_on_a_gpu() -> None:
    q = make("int4", 4, 256)
    assert q.pin_memory().is_pinned()
    assert not q.is_pinned()
    assert torch.equal(q.pin_memory().to("cuda", non_blocking=True).cpu(), q)


def test_another_layout_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(parts: layouts.Parts, scheme: Scheme, k: int) -> layouts.Parts:
        return layouts.Parts(*(None if part is None else part.flip(-2) for part in parts))

    monkeypatch.setitem(layouts.LAYOUTS, "upside-down", layouts.Layout("upside-down", turned, turned))
    q = make("int3", 5, 40)
    moved = q.to_layout("upside-down")
    assert (moved.byte_layout, moved.to_layout("upside-down") is moved) == ("upside-down", True)
    assert torch.equal(moved.packed, q.packed.flip(0))
    assert torch.equal(moved, q)
    for step in (lambda x: x[1:4, 8:16], lambda x: x.t()[8:16], lambda x: torch.cat([x, x]), lambda x: x[2]):
        assert step(moved).byte_layout == "canonical"
        assert torch.equal(step(moved), step(q))
    assert moved.t().byte_layout == moved.clone().byte_layout == "upside-down"
    assert torch.equal(moved.t().dequantize(), q.t().dequantize())
    assert torch.equal(copy.copy(moved).packed, q.packed)  # what a pickle holds


@given(st.lists(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), min_size=1, max_size=4))
def test_joined_tensors_have_the_dtype_that_float_ones_have(dtypes):
    parts = [QTensor.quantize(torch.ones(2, 64, dtype=dtype), "int8") for dtype in dtypes]
    dense = [part.dequantize() for part in parts]
    for join in (torch.cat, torch.stack):
        assert join(parts).dtype == join(dense).dtype
    grouped = [part.requantize("int4_g32") for part in parts]
    assert torch.cat(grouped, dim=1).dtype == torch.cat(dense, dim=1).dtype
