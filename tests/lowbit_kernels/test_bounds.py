"""Operators called with anything: what a tensor does not hold is never read, and what means nothing is an exception.

Whatever reads beyond a tensor here ends the run of the tests.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit import QTensor, Scheme
from lowbit.scheme import PLAIN_SCALES
from lowbit_kernels import cpu
from lowbit_kernels.storage_check import check_storage
from tests.support import strategies  # noqa: F401 - its profile
from tests.support.processors import needs_split_int8

WEIGHTS = ("uint4:g32:zint:bf16", "int8:row:fp32", "fp4_e2m1:g16:fp8_e4m3fn:outer", "fp8_e5m2:row:fp16", "uint3:g32:zfloat:bf16")
MISSING = cpu.available()
N, K = 32, 64


def parts(scheme: str, *lead: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    q = QTensor.quantize(torch.randn(*lead, N, K, generator=torch.Generator().manual_seed(0)), scheme).canonical()
    return q.packed, q.scale, q.zero_point, q.outer


def calls(scheme: str) -> dict[str, list[Any]]:
    """Sound arguments of every operator that has tensors, by its name."""
    x, bias, weight, how = torch.randn(3, K), torch.ones(N), parts(scheme), Scheme.parse(scheme)
    activation = "int8:row:fp32"
    found: dict[str, list[Any]] = {
        "lowbit.linear": [x, *weight, bias, scheme, "canonical"],
        "lowbit.quantized_linear": [x, *weight, bias, scheme, "canonical", activation, torch.tensor(0.5)],
        "lowbit.grouped_linear": [x.expand(2, 3, K).clone(), *parts(scheme, 2), bias.repeat(2, 1), scheme, "canonical"],
        "lowbit.experts_linear": [
            x, *parts(scheme, 2), bias.repeat(2, 1), scheme, "canonical", torch.tensor([0, 1, 1, 0, 0, 1])
        ],
        "lowbit.embedding": [torch.arange(3), *weight, scheme, "canonical", K, torch.float32],
        "lowbit.dequantize": [*weight, scheme, "canonical", K, torch.float32],
        "lowbit.quantize": [torch.randn(N, K), scheme, "range"],
        "lowbit.rms_norm_quantize": [x, torch.ones(K), 1e-6, activation],
        "lowbit.codes_linear": [
            torch.ones(3, K, dtype=torch.uint8), torch.ones(3, 1), *weight, bias, scheme, "canonical", activation, K, x.dtype,
        ],
    }  # fmt: skip
    if MISSING is None:
        scales = None if how.scale in PLAIN_SCALES else cpu.byte_table(how.scale)
        numbers = cpu.number_table(how.format).clone()
        rest = [numbers, scales if scales is None else scales.clone(), how.group_size]
        found |= {
            "lowbit_cpu.linear": [x, *weight, bias, *rest],
            "lowbit_cpu.dequantize": [torch.empty(N, K), *weight, *rest],
            "lowbit_cpu.supports_split_int8": [numbers, False],
            "lowbit_cpu.quantize": [
                torch.randn(N, K), torch.empty(N, K // 2, dtype=torch.uint8), torch.empty(N, 2),
                torch.empty(N, 2, dtype=torch.uint8), 4, 32, 0.0, 15.0, 7.0,
            ],
        }  # fmt: skip
        if torch.ops.lowbit_cpu.has_bf16_dot():
            found["lowbit_cpu.bf16_dot_gemm"] = [x.bfloat16(), *weight, bias, *rest]
        if how.format in cpu.SPLIT_INT8.formats and how.zero_point != "float" and cpu._split_int8_available() is None:
            for limbs in (1, 3):
                found[f"lowbit_cpu.split_int8_gemv {limbs}"] = [x, *weight, bias, *rest, limbs, None]
            found["lowbit_cpu.split_int8_gemv static"] = [x, *weight, bias, *rest, 1, torch.tensor(0.5)]
            found["lowbit_cpu.split_int8_gemv interleaved"] = [x, *weight, bias, *rest, 2, None, True]
            found["lowbit_cpu.split_int8_gemv_prepare"] = [x, *weight, bias, *rest, 2, None]
            prepared = torch.ops.lowbit_cpu.split_int8_gemv_prepare(x, *weight, bias, *rest, 2, None)
            found["lowbit_cpu.prepared_linear"] = [x, prepared, _Kept((weight, bias, rest))]
    return found


class _Kept(tuple):  # type: ignore[type-arg]
    """What a call reads without being given it."""


def operator(name: str) -> Callable[..., Any]:
    library, op = name.split(" ")[0].split(".")
    return getattr(getattr(torch.ops, library), op)


def call(name: str, arguments: list[Any]) -> Any:
    return operator(name)(*(argument for argument in arguments if not isinstance(argument, _Kept)))


CASES = [
    pytest.param(scheme, name, place, id=f"{name}-{scheme}-{place}")
    for scheme in WEIGHTS
    for name, arguments in calls(scheme).items()
    for place, argument in enumerate(arguments)
    if isinstance(argument, Tensor)
]


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_the_calls_are_sound(scheme: str) -> None:
    for name, arguments in calls(scheme).items():
        call(name, arguments)


# ---- tensors that do not hold what they say ----------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "name", "place"), CASES)
@pytest.mark.parametrize("left", [0, 1])
def test_memory_that_is_gone(scheme: str, name: str, place: int, left: int) -> None:
    arguments = calls(scheme)[name]
    arguments[place] = arguments[place].clone()
    arguments[place].untyped_storage().resize_(left)
    with pytest.raises((ValueError, RuntimeError), match="freed or resized"):
        call(name, arguments)


@pytest.mark.parametrize(("scheme", "name", "place"), CASES)
def test_tensors_that_are_elsewhere(scheme: str, name: str, place: int) -> None:
    arguments = calls(scheme)[name]
    given = arguments[place]
    arguments[place] = given.to("meta")
    if name.startswith("lowbit.") and all(not isinstance(a, Tensor) or a.device.type == "meta" for a in arguments):
        return  # what a call with tensors of shapes alone is for
    if name in ("lowbit.quantize", "lowbit.rms_norm_quantize"):
        call(name, arguments)
        return
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=r"on meta|on the CPU|on cpu|CPU tensor"):
        call(name, arguments)


@pytest.mark.parametrize(("scheme", "name", "place"), CASES)
def test_tensors_that_are_no_rows_of_numbers(scheme: str, name: str, place: int) -> None:
    arguments = calls(scheme)[name]
    arguments[place] = arguments[place].to_sparse()
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)):
        call(name, arguments)


def test_rows_that_lie_within_their_storage_are_held() -> None:
    x = torch.arange(60.0)
    for view in (
        x[3:],
        x.view(6, 10)[:, 7:],
        x.as_strided((3, 4), (20, 5), 4),
        x[:1].expand(1 << 40, 60),
        x[60:],
        x.view(6, 10).t(),
    ):
        check_storage(view)
    view = x.view(6, 10)[:, 7:]
    x.untyped_storage().resize_(59 * 4)
    with pytest.raises(ValueError, match=r"float32 \(6, 3\) has a storage of 236 bytes, which does not hold it"):
        check_storage(view)
    check_storage(view[:5])


# ---- anything ----------------------------------------------------------------------------------------------------------

SIZES = (0, 1, 2, 3, 16, 31, 32, 33, 63, 64, 65, 128)
INTEGERS = (
    -(1 << 63),
    -(1 << 40),
    -2,
    -1,
    0,
    1,
    3,
    8,
    9,
    15,
    16,
    31,
    33,
    64,
    1 << 31,
    1 << 40,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
    1 << 70,
)
ALL_DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.uint16, torch.float8_e4m3fn,
)  # fmt: skip
WORDS = (
    *(
        "",
        "canonical",
        "interleaved",
        "mma_fragment",
        "mse",
        "portable",
        "avx2",
        "neon",
        "relu",
        "\0",
        *WEIGHTS,
        "int8",
        "int8:row:fp32",
    ),
    *(f"int8:g{1 << 60}:fp32", f"int8:g{1 << 70}:fp32", "uint4:g7:zint:e8m0", "fp4_e2m1:g16:fp8_e4m3fn:outer"),
)


@st.composite
def tensors(draw: st.DrawFn, like: Tensor) -> Tensor:
    """Other tensors than ``like``: of another shape, dtype, place, order or content."""
    kind = draw(
        st.sampled_from(("shape", "shape", "dtype", "view", "expanded", "empty", "huge", "gone", "meta", "bytes", "numbers"))
    )
    if kind == "shape":
        shape = list(like.shape) or [1]
        change = draw(st.sampled_from(("one", "more", "less", "scalar")))
        if change == "one":
            shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from(SIZES))
        shape = [1, *shape] if change == "more" else shape[1:] if change == "less" else [] if change == "scalar" else shape
        return torch.ones(shape, dtype=like.dtype)
    if kind == "dtype":
        return torch.ones(like.shape).to(draw(st.sampled_from(ALL_DTYPES)))
    if kind == "view" and like.dim() > 1:
        return draw(st.sampled_from((like.mT.contiguous().mT, torch.cat((like, like), -1)[..., : like.shape[-1]], like.flip(0))))
    if kind == "expanded" and like.dim():
        return like.flatten()[:1].expand(like.shape)
    if kind == "empty":
        return torch.empty([0 if draw(st.booleans()) else size for size in like.shape], dtype=like.dtype)
    if kind == "huge":  # more than any machine has, of which the storage holds one
        place, one = draw(st.integers(0, max(like.dim() - 1, 0))), torch.ones(1, dtype=like.dtype)
        return one.expand([1 << 50 if i == place else size for i, size in enumerate(like.shape or (1,))])
    if kind == "gone":
        gone = like.clone()
        gone.untyped_storage().resize_(draw(st.integers(0, max(gone.nbytes - 1, 0))))
        return gone
    if kind == "meta":
        return like.to("meta")
    if kind == "bytes":
        random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        found = torch.randint(0, 256, (like.nbytes,), dtype=torch.uint8, generator=random)
        return found.view(like.dtype).view(like.shape) if like.numel() and like.dtype != torch.int64 else like
    number = draw(st.sampled_from((0, 255, float("nan"), float("inf"), -1e38, 1e-40)))
    return (
        torch.full(like.shape, number).to(like.dtype)
        if like.dtype.is_floating_point
        else torch.full_like(like, int(number == 255) * 255 % 127)
    )


@st.composite
def hostile(draw: st.DrawFn, argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return draw(st.none() | tensors(argument)) if draw(st.integers(0, 9)) == 0 else draw(tensors(argument))
    if isinstance(argument, bool):
        return not argument
    if isinstance(argument, int):
        return draw(st.sampled_from(INTEGERS))
    if isinstance(argument, float):
        return draw(st.sampled_from((0.0, -1.0, 1e-320, float("nan"), float("inf"), 1e30)))
    if isinstance(argument, str):
        return draw(st.sampled_from(WORDS))
    if isinstance(argument, torch.dtype):
        return draw(st.sampled_from(ALL_DTYPES))
    return draw(
        st.sampled_from((torch.ones(1), torch.ones(N), torch.ones(N, 1, dtype=torch.uint8), torch.ones(N, 2), torch.ones(256)))
    )


SOUND = {scheme: calls(scheme) for scheme in WEIGHTS}


@given(data=st.data())
@settings(max_examples=2000)
def test_anything_is_answered(data: st.DataObject) -> None:
    """With a result or an exception."""
    scheme = data.draw(st.sampled_from(WEIGHTS))
    name = data.draw(st.sampled_from(sorted(SOUND[scheme])))
    sound = SOUND[scheme][name]
    given_ones = [a.clone() if isinstance(a, Tensor) else a for a in sound]
    places = [place for place, a in enumerate(sound) if not isinstance(a, _Kept)]
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True)):
        given_ones[place] = data.draw(hostile(given_ones[place]))
    with contextlib.suppress(Exception):
        call(name, given_ones)


@pytest.mark.parametrize("group", [1 << 31, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1024])
@pytest.mark.parametrize("activation", [None, "int8:row:fp32", "fp8_e4m3fn"])
def test_groups_beyond_the_row_are_the_row(group: int, activation: str | None) -> None:
    x = torch.randn(3, K)
    for name in WEIGHTS:
        row = Scheme.parse(name).replace(group_size=-1)
        wide = row.replace(group_size=group)
        packed, scale, zero, outer = torch.ops.lowbit.quantize(torch.randn(N, K), str(row), "range")
        there = packed, scale, zero if row.zero_point != "none" else None, outer if row.outer else None
        rounds = None if activation is None else activation if ":" in activation else f"{activation}:g{group}:fp32"
        op = torch.ops.lowbit.linear if rounds is None else torch.ops.lowbit.quantized_linear
        rest = () if rounds is None else (rounds, None)
        y, wanted = (op(x, *there, None, str(scheme), "canonical", *rest) for scheme in (wide, row))
        assert torch.equal(y, wanted)
    with pytest.raises(ValueError, match="group_size must be below"):
        Scheme("int8", 1 << 63)


@needs_split_int8
def test_prepared_bytes_that_were_written_to() -> None:
    x, prepared, _ = calls("int8:row:fp32")["lowbit_cpu.prepared_linear"]
    wanted = torch.ops.lowbit_cpu.prepared_linear(x, prepared)
    for place in range(prepared.numel()):
        prepared[place] ^= 1
        with pytest.raises(RuntimeError, match="prepared must be what split_int8_gemv_prepare returned"):
            torch.ops.lowbit_cpu.prepared_linear(x, prepared)
        prepared[place] ^= 1
    assert torch.equal(torch.ops.lowbit_cpu.prepared_linear(x, prepared), wanted)


# ---- files --------------------------------------------------------------------------------------------------------------


def test_mutated_files_load_or_are_refused() -> None:
    """A thousand of them; ``python -m tests.support.fuzzed_checkpoints COUNT`` reads as many as one likes."""
    program = [sys.executable, "-m", "tests.support.fuzzed_checkpoints", "1000", "1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout)
    assert counts["loaded"] + counts["refused"] == counts["files"] == 1000
    assert min(counts["loaded"], counts["refused"]) > 100
