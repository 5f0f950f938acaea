"""The modes of torch.compile, how often it compiles, and what two models share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lowbit
from tests.ecosystem.test_compile import Counting
from tests.ecosystem.test_module_state import SCHEMES
from tests.ecosystem.test_torch import dense, layers

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, while it compiles
compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler")


MODES = ("default", "reduce-overhead", "max-autotune")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def rows(m: int) -> Tensor:
    return torch.randn(m, 64, generator=torch.Generator().manual_seed(m))


class Several(nn.Module):
    """Layers of all schemes that read the same x, so that a mode is compiled once for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers(scheme) for scheme in SCHEMES)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) * 2 for part in self.parts]


@pytest.mark.slow
@compiler
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.works_with("compile", mode)) for mode in MODES])
def test_modes_give_what_eager_gives(mode: str) -> None:
    model = Several()
    compiled = torch.compile(model, mode=mode, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (2, 17):
            torch.testing.assert_close(compiled(rows(m)), model(rows(m)))
    x, y = rows(3).requires_grad_(), rows(3).requires_grad_()
    sum(compiled(x)).sum().backward()
    sum(model(y)).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.slow
@compiler
@pytest.mark.works_with("compile", "inline()")
def test_inductor_sees_through_inlined_layers() -> None:
    model = nn.ModuleList(layers(scheme) for scheme in ("int4", "nf4", "int3"))
    compiled = torch.compile(lambda x: [part(x) for part in model], fullgraph=True, dynamic=True)
    with torch.no_grad(), lowbit.inline():
        for found, part in zip(compiled(rows(5)), model, strict=True):
            torch.testing.assert_close(found, dense(part)(rows(5)), rtol=1e-5, atol=1e-5)


@pytest.mark.works_with("compile", "at most two compilations over M = 1 .. 64")
@pytest.mark.works_with("compile", "models of the same shapes and schemes share one")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_models_share_two_compilations(scheme: str) -> None:
    """As many as of a float model: the first row is one of its own, and all other numbers of rows are another."""
    counts = []
    for one, other in ((layers(scheme), layers(scheme)), (dense(layers(scheme)), dense(layers(scheme)))):
        torch.compiler.reset()
        for parameter in other.parameters():
            parameter.data += 0.5
        backend = Counting("aot_eager")
        compiled = [torch.compile(model, backend=backend, fullgraph=True) for model in (one, other)]
        with torch.no_grad():
            for m in range(1, 65):
                for run, model in zip(compiled, (one, other), strict=True):
                    torch.testing.assert_close(run(rows(m)), model(rows(m)))
        counts.append(backend.compilations)
    assert counts[0] <= counts[1] == 2


@pytest.mark.works_with("compile", "models of the same shapes and schemes share one")
def test_another_scheme_is_compiled_anew() -> None:
    backend = Counting("aot_eager")
    for count, scheme in enumerate(("int4", "int8", "int4"), 1):
        model = layers(scheme)
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(rows(4)), model(rows(4)))
        assert backend.compilations == min(count, 2)


@pytest.mark.works_with("compile", "weights that are exchanged or written into")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_compiled_model_multiplies_by_the_weights_that_it_has(scheme: str) -> None:
    model, other = layers(scheme), layers(scheme)
    backend = Counting("aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for parameter in other.parameters():
        parameter.data += 0.5
    with torch.no_grad():
        compiled(rows(4))
        for change in (
            lambda: model[0].weight.data.add_(1),
            lambda: model.load_state_dict(other.state_dict()),
            lambda: model.load_state_dict(layers(scheme).state_dict(), assign=True),
            lambda: setattr(model[0], "weight", other[0].weight),
        ):
            change()
            torch.testing.assert_close(compiled(rows(4)), model(rows(4)))
    assert backend.compilations == 1
