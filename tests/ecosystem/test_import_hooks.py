"""A module's weight lies in the layout that kernels read where it is, and canonical in everything that leaves the run."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import QEmbedding, QLinear, QTensor, Scheme, load, quantize_, save
from lowbit_kernels import layouts, mma_fragment, reference, registry
from lowbit_kernels.registry import Call, Kernel, preferred_layout
from tests.lowbit.test_tensor import make

X = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))


def linear_from_tiles(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, *rest: Any) -> Tensor:
    parts = mma_fragment.restore(packed, scale, zero, rest[-1], x.shape[-1])
    return reference.linear(x, *parts, *rest)


def row(name: str, m: tuple[int, int | None] = (1, None), **fields: Any) -> Kernel:
    fields = {"devices": frozenset({"cpu"}), "layout": "mma_fragment", **fields}
    return Kernel(name, "linear", linear_from_tiles, "weights rounded once", m=m, **fields)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Rows before the real ones; the test fills the list."""
    real, added = registry.kernels(), list[Kernel]()
    monkeypatch.setattr(registry, "kernels", lambda: (*added, *real))
    registry._select.cache_clear()
    yield added
    registry._select.cache_clear()


@pytest.fixture
def cpu_reads_tiles(rows: list[Kernel]) -> None:
    """This CPU has kernels for every M that read mma_fragment, of float32 and float16 weights."""
    dtypes = frozenset({torch.float32, torch.float16})
    rows += [row("small_from_tiles", (1, 8), dtypes=dtypes), row("large_from_tiles", (9, None), dtypes=dtypes)]


def call(**fields: Any) -> Call:
    usual = {"op": "linear", "device": "cpu", "arch": 0, "layout": "canonical", "dtype": torch.float32, "m": 1, "n": 6, "k": 40}
    return Call(**{**usual, "scheme": Scheme.parse("int4"), **fields})


def linear(scheme: str = "int4", seed: int = 0) -> QLinear:
    return QLinear(make(scheme, 6, 40, seed=seed), nn.Parameter(torch.randn(6)))


def in_tiles(module: QLinear | QEmbedding) -> bool:
    """Whether the name of the layout and the bytes say so."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert module._parameters["weight"] is weight
    wanted = weight.canonical().to_layout(weight.byte_layout)._parts()
    assert all(torch.equal(part, wanted[name]) for name, part in weight._parts().items())
    return weight.byte_layout == "mma_fragment"


# ---- which layout ----------------------------------------------------------------------------------------------


@given(ranges=st.lists(st.tuples(st.integers(0, 20), st.none() | st.integers(0, 30)), max_size=5))
def test_a_layout_is_preferred_where_its_rows_take_every_m(ranges: list[tuple[int, int | None]]) -> None:
    added = [row(f"row {i}", span) for i, span in enumerate(ranges)]
    with pytest.MonkeyPatch.context() as patch:
        real = registry.kernels()
        patch.setattr(registry, "kernels", lambda: (*added, *real))
        covers = all(any(low <= m and (high is None or m <= high) for low, high in ranges) for m in (*range(1, 40), 1 << 30))
        for m in (0, 1, 7):
            assert preferred_layout(call(m=m, layout="mma_fragment")) == ("mma_fragment" if covers else "canonical")


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": frozenset({"cuda"})},
        {"dtypes": frozenset({torch.float16})},
        {"formats": frozenset({"int8"})},
        {"arch": 90},
        {"on_request": True},
        {"layout": None},
        {"available": lambda: "not built"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_rows_that_refuse_the_call_count_for_nothing(rows: list[Kernel], fields: dict[str, Any]) -> None:
    rows.append(row("narrow", **fields))
    assert preferred_layout(call()) == "canonical"
    rows.append(row("wide"))
    assert preferred_layout(call()) == "mma_fragment"
    with registry.strict("reference_linear"):
        assert preferred_layout(call()) == "mma_fragment"
    assert preferred_layout(call(op="quantized_linear")) == preferred_layout(call(device="meta")) == "canonical"


# ---- arriving --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_reads_tiles")
@pytest.mark.parametrize("scheme", ["int4", "int8", "int3", "nvfp4", "mxfp4"])
def test_a_weight_is_arranged_once_when_it_arrives(scheme: str) -> None:
    q = make(scheme, 6, 40)
    module = QLinear(q, nn.Parameter(torch.randn(6)))
    assert in_tiles(module)
    assert q.byte_layout == "canonical"
    assert torch.equal(module.weight, q)
    packed = module.weight.packed
    with lowbit.trace_kernels() as trace:
        y = module(X)
    assert torch.equal(y, F.linear(X, q.dequantize(), module.bias))
    assert {(entry.kernel, entry.layout) for entry in trace.counts} == {("small_from_tiles", "mma_fragment")}
    assert module.weight.packed is packed
    assert torch.equal(module(X), y)
    assert "from mma_fragment: small_from_tiles" in str(lowbit.explain(module))
    module.weight = make(scheme, 6, 40, seed=3)
    assert in_tiles(module)
    torch.testing.assert_close(module(X), F.linear(X, make(scheme, 6, 40, seed=3).dequantize(), module.bias))


@pytest.mark.usefixtures("cpu_reads_tiles")
def test_what_no_row_reads_stays_canonical() -> None:
    assert not in_tiles(QEmbedding(make("int4", 6, 40)))
    activated = QLinear(make("int8", 6, 40), activation=Scheme.parse("int8"))
    assert not in_tiles(activated)
    activated.activation = None
    assert in_tiles(activated)
    activated.activation = Scheme.parse("int8")
    assert not in_tiles(activated)
    assert not in_tiles(linear().double())
    assert QLinear(make("int4", 6, 40).to("meta")).weight.byte_layout == "canonical"


def test_what_x_is_rounded_to_counts(rows: list[Kernel]) -> None:
    """The layout, the plan, explain and fast dispatch see the same call as the operator."""
    int8 = Scheme.parse("int8")

    def product(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Any, bias: Any, *how: Any) -> Tensor:
        return reference.quantized_linear(x, *mma_fragment.restore(packed, scale, zero, how[0], x.shape[-1]), outer, bias, *how)

    def predicate(call: Call) -> str | None:
        return None if call.activation == int8 else "activation: takes int8"

    rows.append(Kernel("from_tiles", "quantized_linear", product, "exact", layout="mma_fragment", predicate=predicate))
    module, other = (QLinear(make("int8", 6, 40), None, kind) for kind in (int8, Scheme("fp8_e4m3fn")))
    assert in_tiles(module)
    assert not in_tiles(other)
    y = module(X)
    for _ in range(2):
        with lowbit.trace_kernels() as trace:
            assert torch.equal(module(X), y)
        assert set(trace.kernels()) == {"from_tiles"}
    assert next(iter(module.weight._dispatch.values())) is product
    assert lowbit.explain(module).kernel == "from_tiles"
    target = lowbit.LayerConfig(Scheme.parse("int8"), int8)
    assert lowbit.plan(nn.Sequential(nn.Linear(40, 6)), target).layers[0].layout == "mma_fragment"
    module.activation = Scheme("fp8_e4m3fn")
    assert not in_tiles(module)


@pytest.mark.usefixtures("cpu_reads_tiles")
def test_the_layout_follows_the_module() -> None:
    module = linear()
    plain, before, weight = module.weight.canonical(), module.weight.detach(), module.weight
    for kind, tiled in ((torch.float16, True), (torch.float64, False), (torch.float32, True), (torch.bfloat16, False)):
        module.to(kind)
        assert in_tiles(module) == tiled
        assert module.weight is weight
        assert torch.equal(weight.packed, plain.to_layout(weight.byte_layout).packed)
        torch.testing.assert_close(
            module(X.to(kind)).double(), F.linear(X, plain.dequantize(), module.bias.float()).double(), rtol=0.1, atol=0.1
        )
    assert torch.equal(before, plain)  # a tensor over the bytes that were there before means what it did
    module.float().to("meta")
    assert module.weight.byte_layout == "canonical"
    assert module.weight.packed.shape == plain.packed.shape
    module.to_empty(device="cpu").load_state_dict(QLinear(plain, nn.Parameter(torch.zeros(6))).state_dict())
    assert in_tiles(module)
    assert torch.equal(module.weight, plain)


@pytest.mark.works_with("torch", ".to(dtype), .half(), .float()")
@pytest.mark.usefixtures("cpu_reads_tiles")
@pytest.mark.parametrize("way", ["swap", "overwrite", "set data"])
def test_each_way_that_torch_converts_parameters(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", way == "swap")
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", way == "overwrite")
    model = nn.ModuleList([linear(), QLinear(make("int4", 6, 40, seed=1)), QLinear(make("int4", 6, 40, seed=1))])
    model[2].weight = model[1].weight
    plain = [module.weight.canonical() for module in model]
    for kind in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
        model.to(kind)
        for module, weight in zip(model, plain, strict=True):
            in_tiles(module)
            assert torch.equal(module.weight.to(weight.dtype), weight)
        assert in_tiles(model[0]) == (kind in (torch.float16, torch.float32))
        assert tied(model[1], model[2]) or way == "overwrite"


@pytest.mark.usefixtures("cpu_reads_tiles")
@pytest.mark.parametrize("scheme", ["int4", "int8", "nvfp4"])
def test_copies_states_and_pickles_are_canonical(scheme: str) -> None:
    module = linear(scheme)
    plain = module.weight.canonical()
    state = module.state_dict()
    assert torch.equal(state["weight"], plain)
    rebuild, parts = module.weight.__reduce_ex__(2)
    assert torch.equal(parts[0], plain.packed)
    assert torch.equal(rebuild(*parts), plain)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert in_tiles(other)
        assert torch.equal(other(X), module(X))
        assert other.weight.packed.data_ptr() != module.weight.packed.data_ptr()
    assert in_tiles(module)
    for assign in (False, True):
        target = linear(scheme, seed=1)
        target.load_state_dict(state, assign=assign)
        assert in_tiles(target)
        assert torch.equal(target(X), module(X))
    broken = {**{name: part for name, part in plain._parts().items() if name != "scale"}, "bias": state["bias"]}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*scale"):
        linear(scheme).load_state_dict(broken)


@pytest.mark.usefixtures("rows")
def test_a_pickle_from_a_machine_with_kernels_opens_on_one_without(rows: list[Kernel]) -> None:
    rows.append(row("from_tiles"))
    module = linear()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    y = module(X)
    rows.clear()
    other = torch.load(file, weights_only=False)
    assert not in_tiles(other)
    torch.testing.assert_close(other(X), y)


@pytest.mark.usefixtures("cpu_reads_tiles")
def test_a_layout_that_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(parts: layouts.Parts, scheme: Scheme, k: int) -> layouts.Parts:
        return layouts.Parts(*(None if part is None else part.flip(-2) for part in parts))

    monkeypatch.setitem(layouts.LAYOUTS, "upside-down", layouts.Layout("upside-down", turned, turned))
    module = QLinear(make("int4", 6, 40).to_layout("upside-down"))
    assert module.half().float().weight.byte_layout == "upside-down"
    torch.testing.assert_close(module(X), F.linear(X, make("int4", 6, 40).dequantize()))


# ---- ties ------------------------------------------------------------------------------------------------------


def tied(*modules: QLinear | QEmbedding) -> bool:
    return all(module.weight is modules[0].weight for module in modules)


@pytest.mark.usefixtures("cpu_reads_tiles")
@pytest.mark.parametrize("other", ["embedding", "linear"])
@pytest.mark.parametrize("first", [True, False])
def test_a_weight_that_several_modules_read_is_one_in_a_layout_that_all_read(other: str, first: bool) -> None:
    made: Any = QEmbedding if other == "embedding" else QLinear
    head, shared = QLinear(make("int4", 6, 40)), made(make("int4", 6, 40, seed=1))
    assert in_tiles(head)
    weight = (head if first else shared).weight
    if first:
        shared.weight = head.weight
    else:
        head.weight = shared.weight
    model = nn.ModuleList([head, shared])
    for now in (model, copy.deepcopy(model), copy.deepcopy(model).half().float(), model.double().float()):
        assert tied(*now)
        assert in_tiles(now[0]) == (other == "linear")
        assert torch.equal(now[1].weight, weight)
    head.weight = make("int4", 6, 40, seed=2)
    assert in_tiles(head)
    assert not tied(*model)


class Language(nn.Module):
    def __init__(self, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(40, 12, bias=False)
        self.embed, self.body = nn.Embedding(12, 40), nn.Linear(40, 40)
        if not head_first:
            self.head = nn.Linear(40, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.body(self.embed(index)))


@pytest.mark.usefixtures("cpu_reads_tiles")
@pytest.mark.parametrize("head_first", [True, False])
def test_quantize_and_load_arrange_what_is_read_by_one_module(head_first: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Language(head_first)
    there = lowbit.plan(model, {"embed": "int4", "*": "int4"})
    assert {layer.name: layer.layout for layer in there.layers} == {
        "head": "canonical",
        "embed": "canonical",
        "body": "mma_fragment",
    }
    assert "large_from_tiles from mma_fragment" in str(there)
    assert [layer["layout"] for layer in there.to_dict()["layers"]].count("mma_fragment") == 1
    quantize_(model, {"embed": "int4", "*": "int4"})
    index = torch.tensor([[1, 11, 3]])
    y = model(index)
    save(model, tmp_path)
    again = load(tmp_path, Language(head_first))
    with torch.device("meta"):
        fresh = Language(head_first)
    for now in (model, again, load(tmp_path, fresh)):
        assert in_tiles(now.body)
        assert not in_tiles(now.head)
        assert tied(now.head, now.embed)
        assert torch.equal(now(index), y)


@pytest.mark.usefixtures("cpu_reads_tiles")
def test_compile_and_export_see_the_operator_with_the_layout() -> None:
    module = linear()
    exported = torch.export.export(module, (X,))
    assert any("lowbit.linear" in str(node.target) and "mma_fragment" in node.args for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(X), module(X))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), module(X))
    torch.compiler.reset()


# ---- how much memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int3", "int8"])
def test_a_weight_is_arranged_some_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = QTensor.quantize(torch.randn(2, 100, 300, generator=torch.Generator().manual_seed(0)), name)
    whole = q.to_layout("mma_fragment")
    seen = []

    def spans(n: int, k: int, device: torch.device) -> Iterator[slice]:
        for start in range(0, n, 32):
            seen.append(start)
            yield slice(start, min(start + 32, n))

    monkeypatch.setattr(mma_fragment, "_spans", spans)
    pieces = q.to_layout("mma_fragment")
    assert all(torch.equal(part, whole._parts()[key]) for key, part in pieces._parts().items())
    assert torch.equal(pieces.canonical(), q)
    assert seen == [0, 32, 64, 96] * 4


@given(n=st.integers(1, 100_000), k=st.integers(1, 40_000))
def test_spans_are_whole_tiles_and_small(n: int, k: int) -> None:
    for device, most in (("cpu", 1 << 20), ("cuda", 1 << 24)):
        last = 0
        for span in mma_fragment._spans(n, k, torch.device(device)):
            assert span.start == last
            assert span.start % mma_fragment.ROWS == 0
            assert (span.stop - span.start) * k <= max(most, mma_fragment.ROWS * k)
            last = span.stop
        assert last == n


# ---- weights that are put in past the module ---------------------------------------------------------------------


@pytest.mark.works_with("torch", "functional_call")
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4_row", "int3_g48", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.usefixtures("cpu_reads_tiles")
def test_a_functional_call_takes_any_weight(scheme: str, warm: bool) -> None:
    """A weight says itself how its bytes lie: handed out, copied, of another layer, in another layout, of another scheme."""
    module, other = QLinear(make(scheme, 32, 512, seed=3)), QLinear(make(scheme, 32, 512, seed=9))
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    expected, theirs = module(x), other(x)
    assert in_tiles(module)
    for held, want in (
        (module.state_dict(), expected),
        (dict(module.named_parameters()), expected),
        ({name: part.clone() for name, part in module.state_dict().items()}, expected),
        (other.state_dict(), theirs),
        (dict(other.named_parameters()), theirs),
        ({"weight": other.weight.canonical()}, theirs),
        ({"weight": other.weight.dequantize()}, theirs),
        ({"weight": make("int5", 32, 512, seed=4)}, F.linear(x, make("int5", 32, 512, seed=4).dequantize())),
    ):
        if warm:
            module(x)
        torch.testing.assert_close(torch.func.functional_call(module, held, (x,)), want, rtol=1e-4, atol=1e-4)
        assert torch.equal(module(x), expected)
