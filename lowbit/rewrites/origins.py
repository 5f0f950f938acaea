"""Where tensors come from in one run of a model, told by autograd.

Each layer's and each norm's output is cut off from what came before, as a leaf of the graph that autograd keeps. What reaches a
tensor then comes from the layers right before it, through additions, products, attention and whatever else has no weights. A
vector that is sent backwards from a norm's input, and arrives at a layer's output as a multiple of itself, says that this output
is added to what the norm reads, a number a token at most in between: that layer writes to the stream. Sent from a layer's input
to a norm's output, it says in the same way that the layer reads the norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calibration.nesting import leaves, rebuilt
from ..layers import has_own_forward, layer_kind
from .norms import Norm, measured

__all__ = ["Origin", "Output", "Reading", "Trace"]

_PARALLEL = 1e-4  # the sine between two directions that were computed in float32


class Output(NamedTuple):
    """The leaf ``place`` of what the module ``name`` gives."""

    name: str
    place: int


class Origin(NamedTuple):
    """How a tensor comes from an output of ``width`` channels: ``parallel``, as a multiple of it a row; ``rowwise``, each row
    from one alone."""

    width: int
    parallel: bool
    rowwise: bool


@dataclass
class Reading:
    """A module's input: its width, and the outputs that it comes from."""

    name: str
    width: int
    origins: dict[Output, Origin]


class Trace:
    """What a run of ``model`` shows: what each module with a weight, and each norm, reads."""

    def __init__(self, model: nn.Module) -> None:
        self.readings: list[Reading] = []
        self.norms: dict[str, Norm] = {}
        self.calls: dict[str, tuple[Any, Any]] = {}
        self.sources = {name: module for name, module in model.named_modules() if _has_weight(module)}
        self.embeddings = {name for name, module in self.sources.items() if layer_kind(module) == "embedding"}
        self._bare = {name: module for name, module in model.named_modules() if _is_bare(module) and name not in self.sources}
        self._none: set[str] = set()  # modules that are no norms
        self._home: dict[int, Output] = {}
        self._leaves: list[Tensor] = []  # told apart by their identity, and so have to live
        self._looking = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for name, module in self.sources.items():
                hooks.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._after(name)).remove)
            for name, module in self._bare.items():
                hooks.callback(module.register_forward_hook(self._after_bare(name)).remove)
            yield

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if (layer_kind(module) is None or has_own_forward(module)) and name not in self.calls:
                self.calls[name] = rebuilt((args, kwargs), _detached)
            x = next((leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
            if x is None or x.dim() == 0:
                return
            self.readings.append(Reading(name, x.shape[-1], self.origins(x)))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            count = iter(range(1 << 30))
            return rebuilt(output, lambda leaf: self._cut(leaf, Output(name, next(count))))

        return hook

    def _after_bare(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            x = args[0] if args else None
            if self._looking or name in self._none or not isinstance(x, Tensor) or not isinstance(output, Tensor):
                return None
            if not x.is_floating_point() or x.shape != output.shape or x.dim() == 0:
                return None
            if name not in self.norms:
                self._looking = True
                found = measured(module, x.shape[-1])
                self._looking = False
                if found is None:
                    self._none.add(name)
                    return None
                self.norms[name] = found
            self.readings.append(Reading(name, x.shape[-1], self.origins(x)))
            return self._cut(output, Output(name, 0))

        return hook

    def _cut(self, leaf: Any, home: Output) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
            return leaf
        made = leaf.detach().requires_grad_()
        self._home[id(made)] = home
        self._leaves.append(made)
        return made.clone()  # which may be changed in place

    def origins(self, x: Tensor) -> dict[Output, Origin]:
        """The outputs that ``x`` [..., n] comes from."""
        reached = [leaf for leaf in _reached(x) if id(leaf) in self._home]
        if not reached:
            return {}
        rows = x.reshape(-1, x.shape[-1])
        direction = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x)
        sent = torch.zeros_like(rows)
        sent[-1] = direction
        found = torch.autograd.grad(x, reached, sent.view_as(x), retain_graph=True, allow_unused=True)
        origins: dict[Output, Origin] = {}
        for leaf, gradient in zip(reached, found, strict=True):
            origin = Origin(leaf.shape[-1], True, True)
            if gradient is not None:
                gradient = gradient.reshape(-1, gradient.shape[-1]).double()
                gradient = gradient[gradient.abs().amax(-1) > 0]
                origin = Origin(leaf.shape[-1], _parallel(gradient, direction.double()), len(gradient) <= 1)
            home = self._home[id(leaf)]
            before = origins.get(home, origin)
            origins[home] = Origin(origin.width, origin.parallel and before.parallel, origin.rowwise and before.rowwise)
        return origins


def _has_weight(module: nn.Module) -> bool:
    """Whether it is a layer, or another module that multiplies by a parameter of its own and has no layer inside."""
    if layer_kind(module) is not None:
        return True
    own = any(parameter is not None and parameter.dim() >= 2 for parameter in module._parameters.values())
    return own and not any(layer_kind(child) for child in module.modules())


def _is_bare(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _reached(x: Tensor) -> list[Tensor]:
    """The leaves that autograd would reach from ``x``, each once."""
    found: dict[int, Tensor] = {}
    waiting, seen = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        waiting += [before for before, _ in node.next_functions]
    return list(found.values())


def _parallel(rows: Tensor, direction: Tensor) -> bool:
    """Whether every row of ``rows`` is a multiple of ``direction``."""
    if rows.shape[-1] != len(direction):
        return False
    along = rows @ direction / direction.square().sum()
    return bool(((rows - along[:, None] * direction).norm(dim=-1) <= _PARALLEL * rows.norm(dim=-1)).all())
