"""Folding a rotation of the residual stream into the parameters of what reads and writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.hf_config import is_pretrained
from ..layers import layer_kind, replace_module, replacement_loses
from ..module_attributes import transfer_attributes
from ..transforms import RMSNorm, TransformedLinear
from .fold_rules import FoldRule, FoldRules
from .hadamard import Rotation
from .residual_stream import ResidualStream

__all__ = ["Folding"]

_Place = tuple[str, str]  # a module and the name of its parameter


class Folding:
    """The changes that make ``model`` one with a rotated ``stream``. Making it checks everything and changes nothing;
    :meth:`apply` does it. Raises ``ValueError`` that names a module for what cannot be folded."""

    def __init__(self, model: nn.Module, stream: ResidualStream, rotation: Rotation, online: bool) -> None:
        self._model, self._stream, self._rotation = model, stream, rotation
        self._names = {module: name for name, module in model.named_modules()}
        self._biases = self._added_biases()
        self._online = {name: Rotation.of(self._columns(name), None) for name in stream.rowwise} if online else {}
        if online and not self._online:
            raise ValueError("online rotation is for down projections, and this model has none that is a layer of its own")
        self._rules: dict[_Place, list[FoldRule]] = {}
        finder = FoldRules(stream, rotation)
        for name in sorted(stream.readers.keys() | stream.writers.keys()):
            module = model.get_submodule(name)
            for leaf, rules_of_parameter in finder.of(name, module).items():
                self._rules[name, leaf] = rules_of_parameter
            if name in self._biases and name in stream.writers and module._parameters.get("bias") is None:
                self._rules[name, "bias"] = [FoldRule(0, rotation, stream.centres)]
            if name in self._online:
                inputs = 0 if layer_kind(module) == "conv1d" else 1
                self._rules[name, "weight"].append(FoldRule(inputs, self._online[name], False))
        self._rules = {place: rules_of_parameter for place, rules_of_parameter in self._rules.items() if rules_of_parameter}
        self._check_parameters()
        self._check_replaced()
        self._groups = self._group_places()

    def _columns(self, name: str) -> int:
        module = self._model.get_submodule(name)
        return int(module.weight.shape[0 if layer_kind(module) == "conv1d" else 1])  # type: ignore[index]

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

    # ---- parameters that several modules read --------------------------------------------------------------------

    def _check_parameters(self) -> None:
        for (name, leaf), _ in self._rules.items():
            module = self._model.get_submodule(name)
            parameter = module._parameters.get(leaf)
            if leaf == "bias" and parameter is None:
                continue
            if type(parameter) is not nn.Parameter or not parameter.is_floating_point() or parameter.is_meta:
                raise ValueError(
                    f"{name}.{leaf} is no plain float parameter: rotate the model before anything else is done to it"
                )

    def _check_replaced(self) -> None:
        """Modules that others take the place of must carry nothing that would be lost."""
        norms = [name for name, norm in self._stream.norms.items() if norm.centres]
        for name in (*norms, *self._online, *(name for name in self._biases if not self._has_bias(name))):
            loss = replacement_loses(self._model.get_submodule(name))
            if loss is not None:
                raise ValueError(f"rotation puts another module in the place of {name}, and cannot: {loss}")

    def _has_bias(self, name: str) -> bool:
        return self._model.get_submodule(name)._parameters.get("bias") is not None

    def _group_places(self) -> list[list[_Place]]:
        """The places that share a parameter and are rotated alike, by parameter; those rotated otherwise than the first apart."""
        places_of: dict[int, list[_Place]] = {}
        for module, name in self._names.items():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    places_of.setdefault(id(parameter), []).append((name, leaf))
        groups: list[list[_Place]] = []
        for places in places_of.values():
            ruled = [place for place in places if place in self._rules]
            if not ruled:
                continue
            if len(ruled) < len(places):
                other = next(place for place in places if place not in self._rules)
                raise ValueError(f"{'.'.join(other)} is {'.'.join(ruled[0])}, and was not found to read or write the stream")
            by_rule: list[list[_Place]] = []
            # An embedding keeps the parameter, and a head gets a new one.
            for place in sorted(ruled, key=lambda place: place[0] in self._stream.readers):
                same_rule = next((group for group in by_rule if self._same_rules(group[0], place)), None)
                by_rule.append([place]) if same_rule is None else same_rule.append(place)
            groups += by_rule
        return groups

    def _same_rules(self, a: _Place, b: _Place) -> bool:
        one, other = self._rules[a], self._rules[b]
        return len(one) == len(other) and all(x.same(y) for x, y in zip(one, other, strict=True))

    # ---- doing it ------------------------------------------------------------------------------------------------

    def apply(self) -> list[str]:
        """Change the model; what there is to know of it beside that it is rotated."""
        notes = [*self._untie(), *self._add_biases()]
        shared = {place for group in self._groups for place in group[1:]}
        for name, leaf in dict.fromkeys([*self._rules, *((name, "bias") for name in self._biases)]):
            if (name, leaf) not in shared:
                self._fold(self._model.get_submodule(name).get_parameter(leaf), name, leaf)
        notes += [*self._strip_norms(), *self._prepare()]
        if self._stream.guessed:
            names = self._stream.guessed
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            notes.append(f"{', '.join(names[:3])}{more}: reached by no data, and rotated as those of the same name are")
        return notes

    def _fold(self, parameter: nn.Parameter, name: str, leaf: str) -> None:
        rules, added = self._rules.get((name, leaf), []), self._biases.get(name) if leaf == "bias" else None
        if len(rules) == 1 and added is None:
            rules[0].apply(parameter.data)
            return
        wide = parameter.data.double()  # rounded to its dtype once, whatever is done to it
        if added is not None:
            wide += added.to(wide.device)
        for rule in rules:
            rule.apply(wide)
        parameter.data.copy_(wide)

    def _untie(self) -> Iterator[str]:
        owner: dict[int, _Place] = {}
        separated: list[str] = []
        for group in self._groups:
            (name, leaf), *_ = group
            parameter = self._model.get_submodule(name).get_parameter(leaf)
            first = owner.setdefault(id(parameter), (name, leaf))
            if first == (name, leaf):
                continue
            made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            for other, place in group:
                self._model.get_submodule(other)._parameters[place] = made
                separated.append(f"{other}.{place}")
            norm = self._stream.readers.get(name)
            loss = f", since {norm} has a gain of its own" if norm else ""
            yield f"{name}.{leaf} is no longer that of {first[0]}{loss}: {made.nbytes:,} bytes more"
        if separated and is_pretrained(self._model):
            _forget_ties(self._model, separated)

    def _add_biases(self) -> Iterator[str]:
        for name in self._biases:
            module: Any = self._model.get_submodule(name)
            if self._has_bias(name):
                continue
            bias = nn.Parameter(module.weight.new_zeros(len(self._biases[name])), module.weight.requires_grad)
            self._replace(module, TransformedLinear(module.weight, bias))
            yield f"{name} has a bias now, that of {self._stream.readers[name]}"

    def _strip_norms(self) -> Iterator[str]:
        replaced = [name for name, norm in self._stream.norms.items() if norm.centres]
        for norm in self._stream.norms.values():
            if norm.centres:
                self._replace(norm.module, RMSNorm(norm.eps))
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
            self._replace(module, TransformedLinear(weight, module._parameters.get("bias"), transform))
        for orders in sorted({str(rotation) for rotation in self._online.values()}):
            count = sum(str(rotation) == orders for rotation in self._online.values())
            yield f"{count} down projections turn what they read, as it comes, by {orders}"

    def _replace(self, old: nn.Module, new: nn.Module) -> None:
        transfer_attributes(old, new)
        names = (name for name, found in self._model.named_modules(remove_duplicate=False) if found is old)
        replace_module(self._model, tuple(names), new)


def _forget_ties(model: Any, names: list[str]) -> None:
    """Let transformers know that the parameters ``names`` are tied no more, now and when a file is read again."""
    from ..pretrained.ties import set_ties

    configs = {id(config): config for config in (model.config, model.config.get_text_config())}
    for config in configs.values():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    set_ties(model, {name: stored for name, stored in ties.items() if name not in names})
