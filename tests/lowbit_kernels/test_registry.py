"""The registry: order, explanations, strict mode, traces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.scheme import Scheme
from lowbit_kernels import crossovers, registry
from lowbit_kernels.registry import Call, Kernel, NoKernelError, explain, kernels, register, select, strict, trace

INT4 = Scheme.parse("uint4:g32:zint:bf16")


def call(m: int = 1, op: str = "linear", device: str = "cpu", scheme: Scheme = INT4, dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call(op, device, 90 if device == "cuda" else 0, "canonical", scheme, dtype, m, 64, 64)


def linear(m: int) -> Tensor:
    packed, scale, zero, _ = torch.ops.lowbit.quantize(torch.ones(8, 64), str(INT4), "range")
    return torch.ops.lowbit.linear(torch.ones(m, 64), packed, scale, zero, None, None, str(INT4), "canonical")


def answer(*args: object) -> str:
    return "ran"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry of four rows in place of the real one."""
    kernels()
    monkeypatch.setattr(registry, "_rows", [])
    small = register(Kernel("small", "linear", answer, "exact", m=(1, 8)))
    large = register(Kernel("large", "linear", answer, "exact", m=(1, None), formats=frozenset({"uint4"})))
    asked = register(Kernel("asked", "linear", answer, "exact", on_request=True))
    last = register(Kernel("reference_linear", "linear", answer, "weights rounded once"))
    monkeypatch.setattr(registry, "kernels", lambda: (small, asked, large, last))
    registry._select.cache_clear()
    yield
    registry._select.cache_clear()


@pytest.mark.usefixtures("rows")
def test_the_first_row_that_takes_the_call_runs() -> None:
    assert select(call(1)).name == "small"
    assert select(call(9)).name == "large"
    assert select(call(9, scheme=Scheme.parse("int8"))).name == "reference_linear"
    assert select(call(0)).name == "reference_linear"


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("measured", "row"), [("large", "large"), ("small", "small"), ("reference_linear", "reference_linear"), ("gone", "small")]
)
def test_a_row_that_was_measured_to_be_faster_runs_first(measured, row, monkeypatch) -> None:
    monkeypatch.setattr(crossovers, "fastest", lambda *call: measured)
    registry._select.cache_clear()
    assert select(call(1)).name == row
    assert select(call(0)).name == "reference_linear"
    with strict("small"):
        assert select(call(1)).name == "small"


@pytest.mark.usefixtures("rows")
def test_a_row_on_request_runs_only_where_it_is_named() -> None:
    assert dict(explain(call(9)))["asked"] == "only on request: strict('asked')"
    with strict():
        assert select(call(9)).name == "large"
        with pytest.raises(NoKernelError, match="asked: only on request"):
            select(call(0))
    with strict("asked"):
        assert select(call(9)).name == "asked"
        assert dict(explain(call(9)))["asked"] is None
    assert select(call(9)).name == "large"


@pytest.mark.usefixtures("rows")
def test_strict_names_each_refusal() -> None:
    with strict("small", "large"), pytest.raises(NoKernelError) as caught:
        select(call(9, scheme=Scheme.parse("int8")))
    text = str(caught.value)
    assert "strict mode asks for large or small" in text
    assert "small: M: takes 1..8, got 9" in text
    assert "large: format: takes uint4, got int8" in text
    assert "reference_linear: not asked for" in text
    with strict(), pytest.raises(NoKernelError, match="a kernel other than the reference"):
        select(call(0))


@pytest.mark.usefixtures("rows")
def test_strict_ends_with_its_block_and_nests() -> None:
    with strict("large"):
        with strict("reference_linear"):
            assert select(call(1)).name == "reference_linear"
        assert select(call(1)).name == "large"
    assert select(call(1)).name == "small"


@given(st.lists(st.sampled_from(("strict", "named", "trace")), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_blocks_end_in_any_order(kinds: list[str], random: Any) -> None:
    """As those of an ExitStack that was entered before another block: nothing stays open, and what is open holds."""
    begin = {"strict": strict, "named": lambda: strict("reference_linear"), "trace": trace}
    open_blocks = [(kind, begin[kind]()) for kind in kinds]
    for _, block in open_blocks:
        block.__enter__()
    while open_blocks:
        assert registry.observed.get()
        assert registry.is_strict() == any(kind != "trace" for kind, _ in open_blocks)
        open_blocks.pop(random.randrange(len(open_blocks)))[1].__exit__(None, None, None)
    assert not registry.observed.get()
    assert not registry.is_strict()


def test_strict_knows_only_kernels_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no kernel named warp_drive; there are .*reference_linear"), strict("warp_drive"):
        pass


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'reference_linear' is registered already"):
        register(next(row for row in kernels() if row.name == "reference_linear"))


@pytest.mark.parametrize("op", sorted({row.op for row in kernels()}))
def test_explain_has_a_line_for_every_row_of_the_operator(op: str) -> None:
    lines = explain(call(op=op))
    assert [name for name, _ in lines] == [row.name for row in kernels() if row.op == op]
    assert lines[-1] == (f"reference_{op}", None)


def test_refusals_name_the_field_and_the_value() -> None:
    row = Kernel(
        "picky",
        "linear",
        answer,
        "exact",
        devices=frozenset({"cuda"}),
        formats=frozenset({"uint4"}),
        zero_points=frozenset({"int"}),
        scales=frozenset({"bf16"}),
        groups=lambda size: None if size % 16 == 0 else "takes multiples of 16",
        dtypes=frozenset({torch.bfloat16}),
        m=(1, 8),
        arch=90,
        available=lambda: None,
        predicate=lambda call: None if call.activation is None else f"activation: takes none, got {call.activation}",
    )
    good = call(device="cuda")
    assert row.refusal(good) is None
    for change, words in (
        ({"device": "cpu"}, "device: takes cuda, got cpu"),
        ({"scheme": INT4.replace(format="uint3")}, "format: takes uint4, got uint3"),
        ({"scheme": INT4.replace(zero_point="float")}, "zero_point: takes int, got float"),
        ({"scheme": INT4.replace(scale="fp32")}, "scale: takes bf16, got fp32"),
        ({"scheme": INT4.replace(scale="fp8_e4m3fn", outer=True)}, "scale: takes bf16, got fp8_e4m3fn+outer"),
        ({"scheme": INT4.replace(group_size=24)}, "group_size: takes multiples of 16, got 24"),
        ({"dtype": torch.float32}, "dtype: takes torch.bfloat16, got torch.float32"),
        ({"layout": "mma_fragment"}, "layout: takes canonical, got mma_fragment"),
        ({"m": 0}, "M: takes 1..8, got 0"),
        ({"m": 9}, "M: takes 1..8, got 9"),
        ({"arch": 80}, "arch: needs at least 90, got 80"),
        ({"activation": INT4}, f"activation: takes none, got {INT4}"),
    ):
        values = {name: getattr(good, name) for name in Call.__dataclass_fields__}
        assert row.refusal(Call(**{**values, **change})) == words


def test_a_row_that_is_unavailable_says_why() -> None:
    row = Kernel("absent", "linear", answer, "exact", available=lambda: "not built: pip install lowbit")
    assert row.refusal(call()) == "unavailable: not built: pip install lowbit"


def test_the_reference_takes_no_rows() -> None:
    assert select(call(0)).name == "reference_linear"
    assert linear(0).shape == (0, 8)


def test_no_selection_without_a_name_takes_a_row_on_request() -> None:
    for m in (1, 8, 9, 300):
        assert not select(call(m)).on_request


def test_trace_counts_what_ran() -> None:
    with trace() as outer:
        linear(3)
        with trace() as inner:
            linear(3)
            linear(0)
    linear(3)
    counts = {(entry.op, entry.m): count for entry, count in outer.counts.items()}
    assert counts == {("quantize", 0): 3, ("linear", 3): 2, ("linear", 0): 1}
    assert sum(inner.counts.values()) == 4
    assert sum(outer.kernels()[name] for name in ("reference_quantize", "cpu_quantize")) == 3
    entry = next(r for r in outer.counts if r.op == "linear" and r.m == 0)
    assert entry[1:] == ("reference_linear", "weights rounded once", str(INT4), "float32", "cpu", 0, 8, 64, "canonical", "none")
    assert "1 x linear by reference_linear (weights rounded once), uint4:g32:zint:bf16, float32 on cpu, M=0 N=8 K=64" in str(
        outer
    )


def test_an_empty_trace_says_so() -> None:
    with trace() as record:
        pass
    assert str(record) == "no quantized operator ran"


def test_registering_every_row_leaves_triton_and_cuda_alone() -> None:
    code = (
        "import sys, torch, lowbit_kernels.ops\n"
        "from lowbit_kernels.registry import kernels\n"
        "before = 'triton' in sys.modules\n"
        "assert any(row.name == 'triton_gemv' for row in kernels())\n"
        "assert before or 'triton' not in sys.modules, 'triton was imported'\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("scheme", ["int4", "nf4", "mxfp4", "nvfp4"])
def test_which_row_takes_more_than_eight_rows_of_x_from_tiles(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper a row that no other device has comes before the one that takes sixteen everywhere."""
    rows = tuple(replace(row, available=lambda: None) for row in kernels())
    monkeypatch.setattr(registry, "kernels", lambda: rows)
    call = Call("linear", "cuda", 90, "mma_fragment", Scheme.parse(scheme), torch.bfloat16, 9, 1024, 1024)
    for change, family in (({}, "mixed_gemm"), ({"m": 8}, "skinny_gemm"), ({"arch": 80, "m": 16}, "skinny_gemm")):
        taking = [name for name, refusal in explain(replace(call, **change)) if refusal is None]
        assert taking[0].startswith(f"cuda_{family}")
