"""Formats, layouts and kernels may be added at any time: products, and what they run on, are the same as if they had always
been there."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import QEmbedding, QLinear, QTensor, Scheme, catalog
from lowbit.catalog import Catalog, cached
from lowbit.formats import FORMATS, Float, Format, FormatSet, Int, Table
from lowbit.scheme import SCHEMES
from lowbit_kernels import crossovers, fast_dispatch, reference, registry
from lowbit_kernels.epilogues import EPILOGUES, Epilogue
from lowbit_kernels.layouts import LAYOUTS, Layout, Parts
from lowbit_kernels.registry import Call, Kernel, explain, kernels, preferred_layout, register, select, strict
from tests import ROOT
from tests.lowbit.test_tensor import make
from tests.support.accuracy import linear_bound

ran: list[str] = []


@contextmanager
def restored() -> Iterator[None]:
    """Whatever the block registers is gone behind it."""
    kernels()  # the library's own are there from now on
    rows, schemes = list(registry._rows), dict(SCHEMES)
    try:
        yield
    finally:
        registry._rows[:] = rows
        SCHEMES.clear()
        SCHEMES.update(schemes)
        for table in (FORMATS, LAYOUTS, EPILOGUES):
            table.clear()
        catalog.invalidate_caches()
        ran.clear()


@pytest.fixture
def scratch() -> Iterator[None]:
    with restored():
        yield


# ---- any order ---------------------------------------------------------------------------------------------------


def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any) -> Any:
        ran.append(name)
        return run(*args)

    return noting


def row(name: str, op: str = "linear", **fields: Any) -> Kernel:
    """A row that is as good as the reference and says that it ran."""
    run = noted(name, getattr(reference, op))
    return Kernel(name, op, run, "weights rounded once", devices=frozenset({"cpu"}), **{"layout": None, **fields})


def turn(parts: Parts, scheme: Scheme, k: int) -> Parts:
    return Parts(parts.packed.flip(0), *(None if part is None else part.flip(0) for part in parts[1:]))


def froa_turned(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, *rest: Any) -> Tensor:
    parts = turn(Parts(packed, scale, zero), rest[-1], x.shape[-1])
    return reference.linear(x, *parts, *rest)


ADDED: dict[str, Callable[[], Any]] = {
    "a kernel for all": lambda: register(row("m_all")),
    "a kernel for few rows": lambda: register(row("b_few", m=(1, 2))),
    "a kernel for the new format": lambda: register(row("c_late", formats=frozenset({"late"}))),
    "a kernel for formats of five bits": lambda: register(row("a_five", formats=FormatSet(lambda f: f.bits == 5), m=(7, 7))),
    "a kernel for int8 activations": lambda: register(row("m_int8", "quantized_linear")),
    "a kernel that looks up": lambda: register(row("m_embedding", "embedding")),
    "a kernel that quantizes": lambda: register(row("m_quantize", "quantize", layout="canonical")),
    "a kernel of the new layout": lambda: register(replace(row("a_turned", layout="turned"), run=noted("a_turned", froa_turned))),
    "a format": lambda: FORMATS.update({"late": Float("late", 1, 3)}),
    "a scheme": lambda: SCHEMES.update({"newcomer": Scheme("int4", 8)}),
    "a layout": lambda: LAYOUTS.update(turned=Layout("turned", turn, turn)),
}
X = {m: torch.randn(m, 40, generator=torch.Generator().manual_seed(m)) for m in (1, 3, 7)}


class Products:
    """One of each kind of product, over weights that were made before anything was added, and over some of what was added."""

    def __init__(self) -> None:
        self.layer, self.rounding = QLinear(make("int4", 6, 40)), QLinear(make("int4", 6, 40), None, Scheme.parse("int8"))
        self.table, self.tensor = QEmbedding(make("int4", 6, 40)), make("nvfp4", 6, 40)
        self.late: QTensor | None = None

    def calls(self) -> dict[str, Callable[[], Any]]:
        q = self.tensor
        parts = q.packed, q.scale, None, q.outer, None, str(q.scheme), "canonical"
        found: dict[str, Callable[[], Any]] = {
            "embedding": lambda: self.table(torch.arange(3)),
            "quantize": lambda: torch.ops.lowbit.quantize(X[3], "uint4:g32:zint:bf16", "range"),
        }
        for m, x in X.items():
            found[f"layer {m}"] = lambda x=x: self.layer(x)
            found[f"rounding {m}"] = lambda x=x: self.rounding(x)
            found[f"tensor {m}"] = lambda x=x: F.linear(x, q)
            found[f"operator {m}"] = lambda x=x: torch.ops.lowbit.linear(x, *parts)
        if "late" in FORMATS:
            if self.late is None:
                self.late = QTensor.quantize(torch.eye(6, 40), Scheme("late", 8))
            for m, x in X.items():
                found[f"late {m}"] = lambda x=x, late=self.late: F.linear(x, late)
        if "newcomer" in SCHEMES:
            found["newcomer"] = lambda: torch.ops.lowbit.quantize(X[3], str(Scheme.parse("newcomer")), "range")
        return found

    def run(self) -> dict[str, list[str]]:
        """Which of the rows above each call ran on."""
        seen = {}
        for name, call in self.calls().items():
            ran.clear()
            call()
            seen[name] = list(ran)
        return seen


PLAIN = {m: ["b_few" if m <= 2 else "m_all"] for m in X}
WANTED = {
    "embedding": ["m_embedding"],
    "quantize": ["m_quantize"],
    "newcomer": ["m_quantize"],
    **{f"{what} {m}": PLAIN[m] for what in ("layer", "tensor", "operator") for m in X},
    **{f"rounding {m}": ["m_int8"] for m in X},
    "late 1": ["b_few"],
    "late 3": ["c_late"],
    "late 7": ["a_five"],
}


@given(st.permutations(sorted(ADDED)), st.sets(st.integers(0, len(ADDED) - 1)))
@settings(max_examples=15, deadline=None)
def test_the_order_of_adding_and_calling_counts_for_nothing(order: list[str], calls: set[int]) -> None:
    with restored():
        products = Products()
        for i, name in enumerate(order):
            if i in calls:
                for _ in range(2):  # the second time a layer goes past the checks, the third time a weight is prepared
                    products.run()
            ADDED[name]()
        for _ in range(3):
            assert products.run() == WANTED
        call = Call("linear", "cpu", 0, "canonical", Scheme("int8", 8), torch.float32, 1, 6, 40)
        assert preferred_layout(call) == "turned"
        arrived = QLinear(QTensor.quantize(torch.eye(6, 40), "int4"))
        ran.clear()
        torch.testing.assert_close(arrived(X[3]), X[3] @ arrived.weight.dequantize().t())
        assert (arrived.weight.byte_layout, ran) == ("turned", ["a_turned"])


@pytest.mark.usefixtures("scratch")
def test_a_compiled_product_takes_a_kernel_that_came_later() -> None:
    layer = QLinear(make("int4", 6, 40))
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        compiled(X[3])
        register(row("m_all"))
        compiled(X[3])
    assert ran == ["m_all"]


@pytest.mark.usefixtures("scratch")
def test_tables_of_a_gpu_do_not_pass_over_rows_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("linear", "cpu", 0, "canonical", Scheme("int8", 8), torch.float32, 3, 6, 40)
    monkeypatch.setattr(crossovers, "fastest", lambda *_: "reference_linear")
    register(row("m_all"))
    assert select(call).name == "m_all"
    monkeypatch.setattr(crossovers, "fastest", lambda *_: "n_other")
    register(row("n_other"))  # which the table must have been measured with
    assert select(call).name == "n_other"


@pytest.mark.usefixtures("scratch")
def test_a_row_made_of_one_of_the_librarys_is_from_elsewhere_too() -> None:
    mine = register(replace(next(row for row in kernels() if row.name == "reference_linear"), name="mine"))
    assert kernels()[0] == mine
    assert mine.home == __name__


# ---- formats -----------------------------------------------------------------------------------------------------

# Of every kind that some row asks for: integers plain, scaled, signed and not, of one to eight bits, floats, tables.
MADE_UP: dict[str, Callable[[str], Format]] = {
    "three_bits": lambda name: Int(name, 3, signed=True),
    "unsigned_five": lambda name: Int(name, 5, signed=False),
    "eighths": lambda name: Table(name, [((c ^ 8) - 8) / 8 for c in range(16)]),
    "one_bit": lambda name: Table(name, (-1, 1)),
    "signs": lambda name: Table(name, (0, 1, 0, -1), unused=(2,)),
    "uneven": lambda name: Table(name, (-7, -5, -4, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 4, 5, 6, 7)),
    "irrational": lambda name: Table(name, [(c - 7.3) / 7.7 for c in range(16)]),
    "tiny_float": lambda name: Float(name, 2, 1),
    "seven_bits": lambda name: Float(name, 3, 3),
    "e4m3": lambda name: Float(name, 4, 3, "fn"),
    "e5m2": lambda name: Float(name, 5, 2, "ieee"),
    "bytes": lambda name: Int(name, 8, signed=True),
    "sixty_fourths": lambda name: Table(name, [((c ^ 128) - 128) / 64 for c in range(256)]),
}


def signatures() -> Iterator[tuple[str, Call]]:
    for name, make_format in MADE_UP.items():
        fmt = make_format(name)
        zero = "none" if fmt.signed else "int"
        for op, layout, device, m in (
            ("linear", "canonical", "cpu", 1),
            ("linear", "canonical", "cpu", 70),
            ("linear", "interleaved", "cpu", 1),
            ("quantized_linear", "canonical", "cpu", 3),
            ("quantize", "canonical", "cpu", 0),
            ("linear", "canonical", "cuda", 9),
            ("quantize", "canonical", "cuda", 0),
        ):
            activation = Scheme("int8", scale="fp32") if op.startswith("quantized") else None
            scheme, arch = Scheme(name, 32, zero), 90 if device == "cuda" else 0
            yield (
                f"{name} {op} {layout} {device} {m}",
                Call(op, device, arch, layout, scheme, torch.bfloat16, m, 64, 128, activation, "range"),
            )


def verdicts() -> dict[str, list[str]]:
    """The rows that take each call, whatever this machine lacks for them."""
    found = {}
    for what, call in signatures():
        lines = [(name, why) for name, why in explain(call) if why is None or why.startswith(("unavailable", "only on request"))]
        found[what] = [name for name, _ in lines]
    return found


TWICE = Epilogue(lambda y: 2 * y, lambda grad, y: 2 * grad)
EARLY = """
import json
from tests.lowbit import test_catalog as t

for name, make_format in t.MADE_UP.items():  # no kernel has been imported yet
    t.FORMATS[name] = make_format(name)
t.EPILOGUES["twice"] = t.TWICE
print(json.dumps([t.verdicts(), [row.name for row in t.kernels() if "twice" in row.epilogues]]))
"""


@pytest.mark.usefixtures("scratch")
def test_kernels_are_the_same_for_what_comes_early_and_late() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], cwd=ROOT, capture_output=True, text=True, check=True)
    for name, make_format in MADE_UP.items():
        FORMATS[name] = make_format(name)
    assert [verdicts(), []] == json.loads(done.stdout)  # no kernel of the library can know an epilogue of one's own


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("name", MADE_UP)
def test_every_kernel_that_takes_a_late_format_multiplies_by_it(name: str) -> None:
    fmt = FORMATS[name] = MADE_UP[name](name)
    generator = torch.Generator().manual_seed(5)
    scheme = Scheme(name, 32, "none" if fmt.signed else "int")
    weight = QTensor.quantize(torch.randn(64, 128, generator=generator), scheme)
    x = torch.randn(2, 128, generator=generator)
    for layout in ("canonical", "interleaved"):
        q = weight.to_layout(layout)
        call = Call("linear", "cpu", 0, layout, scheme, x.dtype, 2, 64, 128)
        taking = [row for row in kernels() if row.op == "linear" and not row.on_request and row.refusal(call) is None]
        assert len(taking) > (layout == "canonical")
        exact = x.double() @ weight.dequantize(torch.float64).mT
        for row in taking:
            with strict(row.name):
                y = F.linear(x, q)
            bound = linear_bound(row.contract, x.double(), weight.dequantize(torch.float64), None, exact, x.dtype)
            assert (y.double() - exact).abs().le(bound).all(), row.name


EXCHANGES: dict[str, Callable[[Format], object]] = {
    "set": lambda fmt: FORMATS.__setitem__(fmt.name, fmt),
    "deleted and set": lambda fmt: (FORMATS.pop(fmt.name), FORMATS.setdefault(fmt.name, fmt)),
    "updated": lambda fmt: FORMATS.update([(fmt.name, fmt)]),
    "cleared and updated": lambda fmt: (FORMATS.clear(), FORMATS.update({fmt.name: fmt})),
    "popped and joined": lambda fmt: (FORMATS.popitem(), FORMATS.__ior__({fmt.name: fmt})),
}


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_nothing_kept_speaks_for_a_format_that_was_exchanged(exchange: Callable[[Format], object]) -> None:
    FORMATS["mine"] = Table("mine", [float((c ^ 8) - 8) for c in range(16)])
    weight = QTensor.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(3)), Scheme("mine", 32))
    layer, x = QLinear(weight), torch.randn(1, 64, generator=torch.Generator().manual_seed(4))
    ways = (layer, lambda x: F.linear(x, weight), lambda x: F.linear(x, weight.dequantize()))
    before = [[way(x) for way in ways] for _ in range(3)][-1]
    exchange(Table("mine", [float((c ^ 8) - 8) / 2 for c in range(16)]))
    for _ in range(3):
        for old, way in zip(before, ways, strict=True):
            torch.testing.assert_close(way(x), old / 2)


@pytest.mark.usefixtures("scratch")
def test_an_epilogue_of_ones_own() -> None:
    EPILOGUES["twice"] = TWICE
    weight = make("int4", 6, 40)
    parts = weight.packed, weight.scale, weight.zero_point, None, None, str(weight.scheme), "canonical"
    torch.testing.assert_close(torch.ops.lowbit.linear(X[3], *parts, "twice"), 2 * torch.ops.lowbit.linear(X[3], *parts))


# ---- the tables --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize(
    ("add", "error", "message"),
    [
        (lambda: FORMATS.update(int4=Table("int4", range(16))), ValueError, r"FORMATS\['int4'\] is the library's own and stays"),
        (lambda: FORMATS.pop("int4"), ValueError, "own and stays: give yours another name"),
        (lambda: FORMATS.popitem(), ValueError, "own and stays"),
        (lambda: FORMATS.update(a=Int("b", 4, True)), ValueError, r"'b' stands under its own name alone: FORMATS\['b'\] = "),
        (lambda: FORMATS.setdefault("a", (1, 2)), TypeError, r"FORMATS\['a'\] must be a Format .*, got tuple"),
        (lambda: FORMATS.pop("gone"), KeyError, "gone"),
        (
            lambda: LAYOUTS.update(mma_fragment=Layout("mma_fragment", turn, turn)),
            ValueError,
            r"LAYOUTS\['mma_fragment'\] is the library's own",
        ),
        (lambda: LAYOUTS.update(a=Layout("b", turn, turn)), ValueError, "'b' stands under its own name alone, got 'a'"),
        (lambda: LAYOUTS.update(a=turn), TypeError, "must be a Layout, got function"),
        (lambda: EPILOGUES.update(relu=EPILOGUES["silu"]), ValueError, r"EPILOGUES\['relu'\] is the library's own"),
        (lambda: EPILOGUES.update(a=torch.relu), TypeError, "must be an Epilogue, got builtin_function"),
    ],
)
def test_what_cannot_be_added(add: Callable[[], object], error: type[Exception], message: str) -> None:
    before = [dict(table) for table in (FORMATS, LAYOUTS, EPILOGUES)]
    with pytest.raises(error, match=message):
        add()
    assert [dict(table) for table in (FORMATS, LAYOUTS, EPILOGUES)] == before


def test_what_the_library_has_may_be_said_again() -> None:
    FORMATS["int4"] = Int("int4", 4, signed=True)
    FORMATS.update(FORMATS)
    assert FORMATS.pop("gone", None) is None


def test_every_way_to_change_a_table_forgets() -> None:
    table = Catalog("NUMBERS", {"one": 1}, lambda name, value: None)
    double = cached(maxsize=8)(lambda name: 2 * table.get(name, 0))
    steps: tuple[tuple[Callable[[], object], int], ...] = (
        (lambda: table.__setitem__("two", 2), 4),
        (lambda: table.update(two=3), 6),
        (lambda: table.update({"two": 4}), 8),
        (lambda: table.update([("two", 5)]), 10),
        (lambda: table.__ior__({"two": 6}), 12),
        (lambda: table.pop("two"), 0),
        (lambda: table.setdefault("two", 7), 14),
        (lambda: table.popitem(), 0),
        (lambda: table.setdefault("two", 8), 16),
        (lambda: table.__delitem__("two"), 0),
        (lambda: table.setdefault("two", 9), 18),
        (lambda: table.clear(), 0),
    )
    for change, wanted in steps:
        change()
        assert double("two") == wanted
    assert dict(table) == {"one": 1}
    assert table.ordered_names() == ["one"]
    table.update(zebra=2, ant=3)
    assert table.ordered_names() == ["ant", "zebra", "one"]


# ---- threads -----------------------------------------------------------------------------------------------------


def test_what_was_begun_before_a_change_is_not_kept() -> None:
    values = [1]

    @cached(maxsize=1)
    def latest() -> int:
        found = values[-1]
        if found == 1:  # as another thread would in the middle
            values.append(2)
            catalog.invalidate_caches()
        return found

    assert [latest(), latest()] == [2, 2]


@pytest.mark.usefixtures("scratch")
def test_a_kernel_that_comes_while_another_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, choose = QLinear(make("int4", 6, 40)), registry.select

    def meanwhile(call: Call) -> Kernel:
        chosen = choose(call)
        monkeypatch.setattr(registry, "select", choose)
        register(row("m_all"))
        return chosen

    monkeypatch.setattr(registry, "select", meanwhile)
    layer(X[3])
    ran.clear()
    layer(X[3])
    assert ran == ["m_all"]


@pytest.mark.usefixtures("scratch")
def test_adding_while_other_threads_multiply() -> None:
    layer, stop, wrong = QLinear(make("int4", 6, 40)), threading.Event(), []
    wanted = layer(X[3])

    def work() -> None:
        while not stop.is_set():
            try:
                torch.testing.assert_close(layer(X[3]), wanted)
            except Exception as error:
                wrong.append(error)
                return

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for i in range(40):
        FORMATS[f"new{i}"] = Int(f"new{i}", 4, signed=True)
        register(row(f"z{99 - i}"))  # each before those that came earlier
    stop.set()
    for worker in workers:
        worker.join()
    assert not wrong
    ran.clear()
    layer(X[3])
    assert ran == ["z60"]


def test_fast_dispatch_is_known_without_being_kept_alive() -> None:
    layer = QLinear(make("int4", 6, 40))
    for x in (*X.values(), *X.values()):
        layer(x)
    known = [reference for reference in fast_dispatch._filled if reference() is layer.weight._dispatch]
    assert len(known) == 1
    del layer
    gc.collect()
    assert known[0] not in fast_dispatch._filled
