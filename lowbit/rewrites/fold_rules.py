"""What a rotation of the residual stream does to each parameter: along which axis it is rotated, and with which gain."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..calibration.pytree import tree_leaves, tree_map
from ..layers import has_custom_forward, layer_kind
from .hadamard import Rotation
from .residual_stream import ResidualStream

__all__ = ["FoldRule", "FoldRules"]

_SAME = 1e-5  # as for the outputs of the model
_ROWS = 4096  # rows that are rotated at a time, in float64
_Leaves = dict[int, Tensor]  # of what a module gives, by their places


class FoldRule(NamedTuple):
    """What becomes of a parameter along one of its axes: times ``gain``, less its mean, times ``rotation``."""

    axis: int
    rotation: Rotation
    centres: bool
    gain: Tensor | None = None

    def same(self, other: FoldRule) -> bool:
        if self.gain is None or other.gain is None:
            return self[:3] == other[:3] and self.gain is other.gain
        return self[:3] == other[:3] and torch.equal(self.gain, other.gain)

    def apply(self, tensor: Tensor) -> None:
        """Do it to ``tensor``, in place."""
        rows = tensor.movedim(self.axis, -1)
        for lead in itertools.product(*(range(size) for size in rows.shape[:-2])):
            matrix = rows[lead] if rows.dim() > 1 else rows[None]
            for start in range(0, len(matrix), _ROWS):
                part = matrix[start : start + _ROWS].double()
                part = part if self.gain is None else part * self.gain.to(part)
                part = part - part.mean(-1, keepdim=True) if self.centres else part
                matrix[start : start + _ROWS] = self.rotation.apply(part).to(tensor.dtype)


class FoldRules:
    """Finds them for each module that reads or writes ``stream``. What computes something of its own is called with rotated
    parameters, and has to give what it gave, rotated."""

    def __init__(self, stream: ResidualStream, rotation: Rotation) -> None:
        self._stream, self._rotation = stream, rotation

    def of(self, name: str, module: nn.Module) -> dict[str, list[FoldRule]]:
        """The turns of each parameter of ``module``, by its name. Raises ``ValueError`` with ``name`` where there are none that
        do what they have to."""
        options = self._layer_candidates(name, module) if layer_kind(module) else self._candidates(name, module)
        if layer_kind(module) and not has_custom_forward(module):
            return {leaf: rules[0] for leaf, rules in options.items()}
        if name not in self._stream.calls:
            raise ValueError(f"{name} ({type(module).__name__}) was reached by no data: give calibration data that reaches it")
        args, want = self._rotated_call(name, module)
        for chosen in itertools.product(*options.values()):
            found = dict(zip(options, chosen, strict=True))
            if _close(_output(module, args, found), want):
                return found
        raise ValueError(
            f"{name} ({type(module).__name__}) is no plain layer, and no way to turn its parameters gives what it gave: "
            "rotation cannot pass it"
        )

    def _rule(self, axis: int, norm: str | None = None) -> FoldRule:
        gain = None if not norm else self._stream.norms[norm].gain
        gain = None if gain is None or bool((gain == 1).all()) else gain
        return FoldRule(axis, self._rotation, self._stream.centres, gain)

    def _layer_candidates(self, name: str, module: nn.Module) -> dict[str, list[list[FoldRule]]]:
        kind = layer_kind(module)
        inputs, outputs = (0, 1) if kind in ("conv1d", "embedding") else (1, 0)
        weight, bias = [], []
        if name in self._stream.readers:
            weight.append(self._rule(inputs, self._stream.readers[name]))
        if name in self._stream.writers:
            weight.append(self._rule(outputs))
            bias.append(self._rule(0))
        return {"weight": [weight], **({} if module._parameters.get("bias") is None else {"bias": [bias]})}

    def _candidates(self, name: str, module: nn.Module) -> dict[str, list[list[FoldRule]]]:
        """What could become of each parameter of a router, or of experts in one tensor, by its axes that are as wide as the
        stream."""
        stream = self._stream
        options: dict[str, list[list[FoldRule]]] = {}
        for leaf, parameter in module.named_parameters():
            axes = [axis for axis, size in enumerate(parameter.shape) if size == stream.width]
            rules = [[self._rule(axis, stream.readers[name])] for axis in axes if name in stream.readers and parameter.dim() > 1]
            for rule in (self._rule(axis) for axis in axes if name in stream.writers):
                if not any(rule.same(other) for (other,) in rules):
                    rules.append([rule])
            if rules:
                options[leaf] = [*rules, []]
        return options

    def _rotated_call(self, name: str, module: nn.Module) -> tuple[tuple[Any, Any], _Leaves]:
        """A call of ``module`` with rotated inputs, and what it has to give."""
        stream, centres = self._stream, self._stream.centres
        first = iter([True])
        plain: list[Tensor] = []

        def random_input(leaf: Any) -> Any:
            if (
                name not in stream.readers
                or not isinstance(leaf, Tensor)
                or not leaf.is_floating_point()
                or not next(first, False)
            ):
                return leaf
            normalized = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            plain.append(normalized - normalized.mean(-1, keepdim=True) if centres else normalized)
            norm = stream.norms.get(stream.readers[name])
            return (plain[0] if norm is None else plain[0] * norm.gain).to(leaf)

        def rotated(leaf: Any) -> Any:
            return self._rotation.apply(plain[0]).to(leaf) if leaf is first_input else leaf

        args = tree_map(stream.calls[name], random_input)
        first_input = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
        want = _output(module, args, {})
        written = stream.writers.get(name, set())
        for place in written & want.keys():
            x = want[place]
            want[place] = self._rotation.apply(x - x.mean(-1, keepdim=True) if centres else x)
        return (tree_map(args, rotated) if plain else args), want


def _output(module: nn.Module, args: tuple[Any, Any], rules: dict[str, list[FoldRule]]) -> _Leaves:
    """What ``module`` gives with rotated parameters."""
    folded = {}
    for leaf, rules_of_parameter in rules.items():
        if rules_of_parameter:
            folded[leaf] = module.get_parameter(leaf).detach().clone()
            for rule in rules_of_parameter:
                rule.apply(folded[leaf])
    positional, named = args
    output = functional_call(module, folded, tuple(positional), dict(named))
    found = enumerate(tree_leaves(output))
    return {i: leaf.double() for i, leaf in found if isinstance(leaf, Tensor) and leaf.is_floating_point()}


def _close(found: _Leaves, want: _Leaves) -> bool:
    for x, y in ((found[place], want[place]) for place in want):
        if x.shape != y.shape or not bool(((x - y).abs() <= _SAME * y.abs().amax()).all()):
            return False
    return True
