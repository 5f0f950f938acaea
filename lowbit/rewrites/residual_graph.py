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

from ..calibration.pytree import tree_leaves, tree_map
from ..layers import has_custom_forward, layer_kind
from .norms import Norm, measure_norm

__all__ = ["TensorOrigin", "ModuleOutput", "ModuleInput", "ResidualGraph"]

_PARALLEL = 1e-4  # the sine between two directions that were computed in float32


class ModuleOutput(NamedTuple):
    """The leaf ``place`` of what the module ``name`` gives."""

    name: str
    place: int


class TensorOrigin(NamedTuple):
    """How a tensor comes from an output of ``width`` channels: ``parallel``, as a multiple of it a row; ``rowwise``, each row
    from one alone."""

    width: int
    parallel: bool
    rowwise: bool


@dataclass
class ModuleInput:
    """A module's input: its width, and the outputs that it comes from."""

    name: str
    width: int
    origins: dict[ModuleOutput, TensorOrigin]


class ResidualGraph:
    """What a run of ``model`` shows: what each module with a weight, and each norm, reads."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: list[ModuleInput] = []
        self.norms: dict[str, Norm] = {}
        self.calls: dict[str, tuple[Any, Any]] = {}
        self.sources = {name: module for name, module in model.named_modules() if _has_weight(module)}
        self.embeddings = {name for name, module in self.sources.items() if layer_kind(module) == "embedding"}
        self._leaf_modules = {
            name: module for name, module in model.named_modules() if _is_leaf_module(module) and name not in self.sources
        }
        self._none: set[str] = set()  # modules that are no norms
        self._output_of: dict[int, ModuleOutput] = {}
        self._leaves: list[Tensor] = []  # told apart by their identity, and so have to live
        self._measuring = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for name, module in self.sources.items():
                hooks.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._after(name)).remove)
            for name, module in self._leaf_modules.items():
                hooks.callback(module.register_forward_hook(self._after_leaf(name)).remove)
            yield

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if (layer_kind(module) is None or has_custom_forward(module)) and name not in self.calls:
                self.calls[name] = tree_map((args, kwargs), _detached)
            x = next(
                (leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
            )
            if x is None or x.dim() == 0:
                return
            self.inputs.append(ModuleInput(name, x.shape[-1], self.origins(x)))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            count = iter(range(1 << 30))
            return tree_map(output, lambda leaf: self._cut(leaf, ModuleOutput(name, next(count))))

        return hook

    def _after_leaf(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            x = args[0] if args else None
            if self._measuring or name in self._none or not isinstance(x, Tensor) or not isinstance(output, Tensor):
                return None
            if not x.is_floating_point() or x.shape != output.shape or x.dim() == 0:
                return None
            if name not in self.norms:
                self._measuring = True
                found = measure_norm(module, x.shape[-1])
                self._measuring = False
                if found is None:
                    self._none.add(name)
                    return None
                self.norms[name] = found
            self.inputs.append(ModuleInput(name, x.shape[-1], self.origins(x)))
            return self._cut(output, ModuleOutput(name, 0))

        return hook

    def _cut(self, leaf: Any, output_place: ModuleOutput) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
            return leaf
        leaf_copy = leaf.detach().requires_grad_()
        self._output_of[id(leaf_copy)] = output_place
        self._leaves.append(leaf_copy)
        return leaf_copy.clone()  # which may be changed in place

    def origins(self, x: Tensor) -> dict[ModuleOutput, TensorOrigin]:
        """The outputs that ``x`` [..., n] comes from."""
        reached = [leaf for leaf in _reached(x) if id(leaf) in self._output_of]
        if not reached:
            return {}
        rows = x.reshape(-1, x.shape[-1])
        direction = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x)
        cotangent = torch.zeros_like(rows)
        cotangent[-1] = direction
        found = torch.autograd.grad(x, reached, cotangent.view_as(x), retain_graph=True, allow_unused=True)
        origins: dict[ModuleOutput, TensorOrigin] = {}
        for leaf, gradient in zip(reached, found, strict=True):
            origin = TensorOrigin(leaf.shape[-1], True, True)
            if gradient is not None:
                gradient = gradient.reshape(-1, gradient.shape[-1]).double()
                gradient = gradient[gradient.abs().amax(-1) > 0]
                origin = TensorOrigin(leaf.shape[-1], _parallel(gradient, direction.double()), len(gradient) <= 1)
            output_place = self._output_of[id(leaf)]
            before = origins.get(output_place, origin)
            origins[output_place] = TensorOrigin(
                origin.width, origin.parallel and before.parallel, origin.rowwise and before.rowwise
            )
        return origins


def _has_weight(module: nn.Module) -> bool:
    """Whether it is a layer, or another module that multiplies by a parameter of its own and has no layer inside."""
    if layer_kind(module) is not None:
        return True
    has_matrix = any(parameter is not None and parameter.dim() >= 2 for parameter in module._parameters.values())
    return has_matrix and not any(layer_kind(child) for child in module.modules())


def _is_leaf_module(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _reached(x: Tensor) -> list[Tensor]:
    """The leaves that autograd would reach from ``x``, each once."""
    found: dict[int, Tensor] = {}
    queue, visited = [x.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        queue += [before for before, _ in node.next_functions]
    return list(found.values())


def _parallel(rows: Tensor, direction: Tensor) -> bool:
    """Whether every row of ``rows`` is a multiple of ``direction``."""
    if rows.shape[-1] != len(direction):
        return False
    along = rows @ direction / direction.square().sum()
    return bool(((rows - along[:, None] * direction).norm(dim=-1) <= _PARALLEL * rows.norm(dim=-1)).all())
