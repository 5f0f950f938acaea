"""Folding a rotation of the residual stream into the parameters of what reads and writes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..calibration.nesting import leaves, rebuilt
from ..checkpoint.skeleton import is_pretrained
from ..inserted import PreparedLinear, RMSNorm
from ..layers import layer_kind, replace_module
from .hadamard import Rotation
from .stream import Stream

__all__ = ["Folding"]

_SAME = 1e-5
_ROWS = 4096  # rows that are turned at a time, in float64
_Place = tuple[str, str]  # a module and the name of its parameter
_Leaves = dict[int, Tensor]  # of what a module gives, by their places


class Turn(NamedTuple):
    """What becomes of a parameter along one of its axes: times ``gain``, less its mean, times ``rotation``."""

    axis: int
    rotation: Rotation
    centres: bool
    gain: Tensor | None = None

    def same(self, other: Turn) -> bool:
        if self.gain is None or other.gain is None:
            return self[:3] == other[:3] and self.gain is other.gain
        return self[:3] == other[:3] and torch.equal(self.gain, other.gain)

    def carry_out(self, tensor: Tensor) -> None:
        """Do it to ``tensor``, in place."""
        rows = tensor.movedim(self.axis, -1)
        for lead in itertools.product(*(range(size) for size in rows.shape[:-2])):
            matrix = rows[lead] if rows.dim() > 1 else rows[None]
            for start in range(0, len(matrix), _ROWS):
                part = matrix[start : start + _ROWS].double()
                part = part if self.gain is None else part * self.gain.to(part)
                part = part - part.mean(-1, keepdim=True) if self.centres else part
                matrix[start : start + _ROWS] = self.rotation.apply(part).to(tensor.dtype)


class Folding:
    """The changes that make ``model`` one with a rotated ``stream``. Making it checks everything and changes nothing;
    :meth:`carry_out` does it. Raises ``ValueError`` that names a module for what cannot be folded."""

    def __init__(self, model: nn.Module, stream: Stream, rotation: Rotation, online: bool) -> None:
        self._model, self._stream, self._rotation = model, stream, rotation
        self._names = {module: name for name, module in model.named_modules()}
        self._biases = self._added_biases()
        self._online = {name: Rotation.of(self._columns(name), None) for name in stream.rowwise} if online else {}
        if online and not self._online:
            raise ValueError("online rotation is for down projections, and this model has none that is a layer of its own")
        self._turns: dict[_Place, list[Turn]] = {}
        for name in sorted(stream.readers.keys() | stream.writers.keys()):
            module = model.get_submodule(name)
            found = self._of_layer(name, module) if layer_kind(module) else self._of_opaque(name, module)
            self._turns.update({(name, leaf): turns for leaf, turns in found.items() if turns})
        self._check_parameters()
        self._groups = self._grouped()

    def _columns(self, name: str) -> int:
        module = self._model.get_submodule(name)
        return int(module.weight.shape[0 if layer_kind(module) == "conv1d" else 1])  # type: ignore[index]

    def _turn(self, axis: int, norm: str | None = None) -> Turn:
        gain = None if not norm else self._stream.norms[norm].gain
        gain = None if gain is None or bool((gain == 1).all()) else gain
        return Turn(axis, self._rotation, self._stream.centres, gain)

    def _added_biases(self) -> dict[str, Tensor]:
        """What the bias of a norm adds to what each of its readers gives."""
        found = {}
        for name, norm in self._stream.readers.items():
            bias = self._stream.norms[norm].bias if norm else torch.zeros(())
            if not bool(bias.any()):
                continue
            module: Any = self._model.get_submodule(name)
            if not isinstance(module.__dict__.get("_parameters", {}).get("weight"), Tensor) or not layer_kind(module):
                raise ValueError(f"{name} reads {norm}, whose bias it cannot take over: it is no linear layer")
            weight = module.weight.t() if layer_kind(module) == "conv1d" else module.weight
            found[name] = weight.detach().double() @ bias.to(weight.device)
        return found

    # ---- which parameters, along which axis ----------------------------------------------------------------------

    def _of_layer(self, name: str, module: nn.Module) -> dict[str, list[Turn]]:
        kind = layer_kind(module)
        inputs, outputs = (0, 1) if kind == "conv1d" else (1, 0)
        found: dict[str, list[Turn]] = {"weight": [], "bias": []}
        if name in self._stream.readers:
            found["weight"].append(self._turn(inputs, self._stream.readers[name]))
        if name in self._stream.writers:
            found["weight"].append(self._turn(1 if kind == "embedding" else outputs))
            if module._parameters.get("bias") is not None or name in self._biases:
                found["bias"].append(self._turn(0))
        if name in self._online:
            found["weight"].append(Turn(inputs, self._online[name], False))
        return found

    def _of_opaque(self, name: str, module: nn.Module) -> dict[str, list[Turn]]:
        """The axes of the parameters of a router, or of experts in one tensor: those with which it gives the rotated output."""
        stream, width = self._stream, self._stream.width
        if name not in stream.opaque:
            raise ValueError(f"{name} ({type(module).__name__}) was reached by no data: give calibration data that reaches it")
        ways: dict[str, list[list[Turn]]] = {}
        for leaf, parameter in module.named_parameters():
            axes = [axis for axis, size in enumerate(parameter.shape) if size == width]
            turns = [[self._turn(axis, stream.readers[name])] for axis in axes if name in stream.readers and parameter.dim() > 1]
            for turn in ([self._turn(axis)] for axis in axes if name in stream.writers):
                if not any(turn[0].same(other[0]) for other in turns):
                    turns.append(turn)
            if turns:
                ways[leaf] = [*turns, []]
        args, want = self._rotated_call(name, module)
        for chosen in itertools.product(*ways.values()):
            found = dict(zip(ways, chosen, strict=True))
            if _close(self._output(name, module, args, found), want):
                return found
        raise ValueError(
            f"{name} ({type(module).__name__}) is no single layer, and no way to rotate its parameters gives what it gave: "
            "rotation cannot pass it"
        )

    def _rotated_call(self, name: str, module: nn.Module) -> tuple[tuple[Any, Any], _Leaves]:
        """A call of ``module`` with rotated inputs, and what it has to give."""
        stream, centres = self._stream, self._stream.centres
        first = iter([True])
        plain: list[Tensor] = []

        def drawn(leaf: Any) -> Any:
            if (
                name not in stream.readers
                or not isinstance(leaf, Tensor)
                or not leaf.is_floating_point()
                or not next(first, False)
            ):
                return leaf
            n = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            plain.append(n - n.mean(-1, keepdim=True) if centres else n)
            norm = stream.norms.get(stream.readers[name])
            return (plain[0] if norm is None else plain[0] * norm.gain).to(leaf)

        def turned(leaf: Any) -> Any:
            return self._rotation.apply(plain[0]).to(leaf) if leaf is given else leaf

        args = rebuilt(stream.opaque[name], drawn)
        given = next((leaf for leaf in leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
        want = self._output(name, module, args, {})
        written = stream.writers.get(name, set())
        for place in written & want.keys():
            x = want[place]
            want[place] = self._rotation.apply(x - x.mean(-1, keepdim=True) if centres else x)
        return (rebuilt(args, turned) if plain else args), want

    def _output(self, name: str, module: nn.Module, args: tuple[Any, Any], turns: dict[str, list[Turn]]) -> _Leaves:
        changed = {}
        for leaf, todo in turns.items():
            if todo:
                changed[leaf] = module.get_parameter(leaf).detach().clone()
                for turn in todo:
                    turn.carry_out(changed[leaf])
        output = _called(module, args, changed)
        found = enumerate(leaves(output))
        return {i: leaf.double() for i, leaf in found if isinstance(leaf, Tensor) and leaf.is_floating_point()}

    # ---- parameters that several modules read --------------------------------------------------------------------

    def _check_parameters(self) -> None:
        for (name, leaf), _ in self._turns.items():
            module = self._model.get_submodule(name)
            parameter = module._parameters.get(leaf)
            if leaf == "bias" and parameter is None:
                continue
            if type(parameter) is not nn.Parameter or not parameter.is_floating_point() or parameter.is_meta:
                raise ValueError(
                    f"{name}.{leaf} is no plain float parameter: rotate the model before anything else is done to it"
                )

    def _grouped(self) -> list[list[_Place]]:
        """The places that share a parameter and are turned alike, by parameter; those turned otherwise than the first apart."""
        homes: dict[int, list[_Place]] = {}
        for module, name in self._names.items():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    homes.setdefault(id(parameter), []).append((name, leaf))
        groups: list[list[_Place]] = []
        for places in homes.values():
            turned = [place for place in places if place in self._turns]
            if not turned:
                continue
            if len(turned) < len(places):
                other = next(place for place in places if place not in self._turns)
                raise ValueError(f"{'.'.join(other)} is {'.'.join(turned[0])}, and was not found to read or write the stream")
            apart: list[list[_Place]] = []
            # An embedding keeps the parameter, and a head gets a new one.
            for place in sorted(turned, key=lambda place: place[0] in self._stream.readers):
                alike = next((group for group in apart if self._alike(group[0], place)), None)
                apart.append([place]) if alike is None else alike.append(place)
            groups += apart
        return groups

    def _alike(self, a: _Place, b: _Place) -> bool:
        one, other = self._turns[a], self._turns[b]
        return len(one) == len(other) and all(x.same(y) for x, y in zip(one, other, strict=True))

    # ---- doing it ------------------------------------------------------------------------------------------------

    def carry_out(self) -> list[str]:
        """Change the model; what there is to know of it beside that it is rotated."""
        notes = [*self._untie(), *self._add_biases()]
        shared = {place for group in self._groups for place in group[1:]}
        for name, leaf in dict.fromkeys([*self._turns, *((name, "bias") for name in self._biases)]):
            if (name, leaf) not in shared:
                self._fold(self._model.get_submodule(name).get_parameter(leaf), name, leaf)
        notes += [*self._strip_norms(), *self._prepare()]
        if self._stream.guessed:
            names = self._stream.guessed
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            notes.append(f"{', '.join(names[:3])}{more}: reached by no data, and rotated as those of the same name are")
        return notes

    def _fold(self, parameter: nn.Parameter, name: str, leaf: str) -> None:
        turns, added = self._turns.get((name, leaf), []), self._biases.get(name) if leaf == "bias" else None
        if len(turns) == 1 and added is None:
            turns[0].carry_out(parameter.data)
            return
        wide = parameter.data.double()  # rounded to its dtype once, whatever is done to it
        if added is not None:
            wide += added.to(wide.device)
        for turn in turns:
            turn.carry_out(wide)
        parameter.data.copy_(wide)

    def _untie(self) -> Iterator[str]:
        owner: dict[int, _Place] = {}
        parted: list[str] = []
        for group in self._groups:
            (name, leaf), *_ = group
            parameter = self._model.get_submodule(name).get_parameter(leaf)
            first = owner.setdefault(id(parameter), (name, leaf))
            if first == (name, leaf):
                continue
            made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            for other, place in group:
                self._model.get_submodule(other)._parameters[place] = made
                parted.append(f"{other}.{place}")
            norm = self._stream.readers.get(name)
            why = f", since {norm} has a gain of its own" if norm else ""
            yield f"{name}.{leaf} is no longer that of {first[0]}{why}: {made.nbytes:,} bytes more"
        if parted and is_pretrained(self._model):
            _forget_ties(self._model, parted)

    def _add_biases(self) -> Iterator[str]:
        for name in self._biases:
            module: Any = self._model.get_submodule(name)
            if module._parameters.get("bias") is not None:
                continue
            bias = nn.Parameter(module.weight.new_zeros(len(self._biases[name])), module.weight.requires_grad)
            replace_module(self._model, self._paths(module), PreparedLinear(module.weight, bias).train(module.training))
            yield f"{name} has a bias now, that of {self._stream.readers[name]}"

    def _strip_norms(self) -> Iterator[str]:
        replaced = [name for name, norm in self._stream.norms.items() if norm.centres]
        for norm in self._stream.norms.values():
            if norm.centres:
                replace_module(self._model, self._paths(norm.module), RMSNorm(norm.eps).train(norm.module.training))
            else:
                norm.strip()
        if replaced:
            yield (
                f"{len(replaced)} norms that took the mean away, {replaced[0]} and so on, are RMS norms now: nothing that is "
                "written to the stream has a mean any more"
            )

    def _prepare(self) -> Iterator[str]:
        for name, rotation in self._online.items():
            module: Any = self._model.get_submodule(name)
            if layer_kind(module) == "conv1d":
                weight = nn.Parameter(module.weight.detach().t().contiguous(), module.weight.requires_grad)
            else:
                weight = module.weight
            transform = rotation.module().to(weight.device)
            made = PreparedLinear(weight, module._parameters.get("bias"), transform).train(module.training)
            replace_module(self._model, self._paths(module), made)
        for orders in sorted({str(rotation) for rotation in self._online.values()}):
            count = sum(str(rotation) == orders for rotation in self._online.values())
            yield f"{count} down projections turn what they read, as it comes, by {orders}"

    def _paths(self, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, found in self._model.named_modules(remove_duplicate=False) if found is module)


def _called(module: nn.Module, args: tuple[Any, Any], parameters: dict[str, Tensor]) -> Any:
    positional, named = args
    return functional_call(module, parameters, tuple(positional), dict(named))


def _close(found: _Leaves, want: _Leaves) -> bool:
    for x, y in ((found[place], want[place]) for place in want):
        if x.shape != y.shape or not bool(((x - y).abs() <= _SAME * y.abs().amax()).all()):
            return False
    return True


def _forget_ties(model: Any, names: list[str]) -> None:
    """Let transformers know that the parameters ``names`` are tied no more, now and when a file is read again."""
    from ..pretrained.ties import set_ties

    configs = {id(config): config for config in (model.config, model.config.get_text_config())}
    for config in configs.values():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    set_ties(model, {name: stored for name, stored in ties.items() if name not in names})
