"""Recipes: which layers become what. Rules from name patterns to targets; the first that matches wins."""

from __future__ import annotations

import difflib
import fnmatch
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from .algorithms import ROUNDERS
from .scales import METHODS
from .scheme import SCHEMES, Scheme

__all__ = ["Recipe", "Rule", "Target"]


@dataclass(frozen=True)
class Target:
    """What becomes of a layer.

    Attributes:
        weight: the scheme of its weight.
        activation: the scheme that its input is rounded to, or None to leave it as it is.
        rounder: how codes are chosen; a key of ``lowbit.algorithms.ROUNDERS``.
        scales: how scales are chosen, ``"range"`` or ``"mse"``.
    """

    weight: Scheme
    activation: Scheme | None = None
    rounder: str = "rtn"
    scales: str = "range"

    def __post_init__(self) -> None:
        if self.rounder not in ROUNDERS:
            raise ValueError(f"no rounder named {self.rounder!r}; there are {', '.join(ROUNDERS)}")
        if self.scales not in METHODS:
            raise ValueError(f"scales must be one of {', '.join(METHODS)}, got {self.scales!r}")
        if self.activation is not None and self.activation.zero_point != "none":
            raise ValueError(f"an activation scheme has no zero point, got {self.activation}")

    @staticmethod
    def of(what: Target | Scheme | str | Mapping[str, Any]) -> Target:
        """A target from a scheme, the name of one, the name of a recipe factory, or a mapping of its fields."""
        if isinstance(what, Target):
            return what
        if isinstance(what, Scheme):
            return Target(what)
        if isinstance(what, str):
            from . import api

            return getattr(api, what)() if what in api.__all__ else Target(Scheme.parse(what))
        if isinstance(what, Mapping):
            known = {"weight", "activation", "rounder", "scales"}
            if unknown := sorted(set(what) - known):
                raise ValueError(f"unknown field {', '.join(unknown)} of a target; there are {', '.join(sorted(known))}")
            if "weight" not in what:
                raise ValueError("a target needs a field 'weight': the name of a scheme")
            fields = dict(what, weight=_scheme(what["weight"]))
            if fields.get("activation") is not None:
                fields["activation"] = activation_scheme(fields["activation"])
            return Target(**fields)
        got = f"the function {what.__name__}: call it" if isinstance(what, FunctionType) else f"{what!r:.80}"
        raise TypeError(f"a target is a scheme, a name or what int4_weight_only() returns, got {got}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`of` takes; fields at their defaults are left out."""
        out: dict[str, Any] = {"weight": str(self.weight)}
        if self.activation is not None:
            out["activation"] = str(self.activation)
        if self.rounder != "rtn":
            out["rounder"] = self.rounder
        if self.scales != "range":
            out["scales"] = self.scales
        return out

    def __str__(self) -> str:
        activation = "" if self.activation is None else f", x {self.activation}"
        how = "" if (self.rounder, self.scales) == ("rtn", "range") else f", {self.rounder}/{self.scales}"
        return f"{self.weight}{activation}{how}"


def _scheme(what: Any) -> Scheme:
    return what if isinstance(what, Scheme) else Scheme.parse(str(what))


def activation_scheme(what: Any) -> Scheme:
    """A scheme for activations; scales of a named one are float32, since nobody stores them."""
    scheme = _scheme(what)
    return scheme.replace(scale="fp32") if what in SCHEMES and scheme.scale == "bf16" else scheme


@dataclass(frozen=True)
class Rule:
    """A pattern of layer names and what becomes of them; None leaves them as they are.

    ``pattern``: a glob over the whole name (``*`` crosses dots), or ``re:`` and a regular expression that is searched.
    """

    pattern: str
    target: Target | None

    def __post_init__(self) -> None:
        if self.pattern.startswith("re:"):
            try:
                re.compile(self.pattern[3:])
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None

    def matches(self, name: str) -> bool:
        """Whether the pattern takes the layer called ``name``."""
        if self.pattern.startswith("re:"):
            return re.search(self.pattern[3:], name) is not None
        return fnmatch.fnmatchcase(name, self.pattern)

    @property
    def catch_all(self) -> bool:
        """Whether it takes every name; such a rule leaves embeddings and the head alone."""
        return self.pattern in ("*", "re:", "re:.*")


@dataclass(frozen=True)
class Recipe:
    """An ordered list of rules; the first whose pattern matches a layer's name decides."""

    rules: tuple[Rule, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("a recipe needs at least one rule")

    @staticmethod
    def of(what: Any) -> Recipe:
        """A recipe from anything that :func:`lowbit.quantize_` takes.

        A recipe; a target or scheme (for every layer); a name (:meth:`parse`); a path; a mapping from patterns to
        targets, schemes, names or None.
        """
        if isinstance(what, Recipe):
            return what
        if isinstance(what, Path):
            return Recipe.from_file(what)
        if isinstance(what, str):
            return Recipe.parse(what)
        if isinstance(what, Mapping):
            return Recipe(tuple(Rule(str(pattern), _target_or_none(value)) for pattern, value in what.items()))
        return Recipe((Rule("*", Target.of(what)),))

    @staticmethod
    def parse(text: str) -> Recipe:
        """A recipe by name: a scheme (``int4_g64``), a factory (``int8_weight_only``), a file, or one in ``recipes/``."""
        from . import api

        if text in api.__all__:
            return Recipe((Rule("*", getattr(api, text)()),), text)
        try:
            return Recipe((Rule("*", Target(Scheme.parse(text))),), text)
        except ValueError:
            pass
        if text.endswith((".yaml", ".yml", ".json")):
            return Recipe.from_file(Path(text))
        shipped = _shipped()
        if text in shipped:
            return Recipe.from_text(shipped[text].read_text(encoding="utf-8"), text)
        near = difflib.get_close_matches(text, [*SCHEMES, *api.__all__, *shipped], n=4, cutoff=0.3)
        raise ValueError(f"no scheme, recipe or file named {text!r}; did you mean {', '.join(near or SCHEMES)}?")

    @staticmethod
    def from_file(path: str | Path) -> Recipe:
        """A recipe from a YAML or JSON file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"recipe {path} cannot be read: {error}") from None
        return Recipe.from_text(text, Path(path).stem)

    @staticmethod
    def from_text(text: str, name: str = "") -> Recipe:
        """A recipe from YAML (of which JSON is a part); see ``recipes/`` for examples."""
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"recipe {name!r} is not YAML: {error}".replace("\n", " ")) from None
        if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
            raise ValueError(f"recipe {name!r} needs a list 'rules' of entries with 'match' and 'weight'")
        return Recipe(tuple(_rule(entry, name) for entry in data["rules"]), str(data.get("name", name)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as :meth:`from_text` reads it."""
        rules = [{"match": r.pattern, **({"weight": None} if r.target is None else r.target.to_dict())} for r in self.rules]
        return {"name": self.name, "rules": rules}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def rule_for(self, names: Iterable[str]) -> Rule | None:
        """The first rule that matches one of a layer's names."""
        names = tuple(names)
        return next((rule for rule in self.rules if any(rule.matches(name) for name in names)), None)


def _target_or_none(value: Any) -> Target | None:
    if value is None:
        return None
    if isinstance(value, Recipe):
        if len(value.rules) != 1:
            raise ValueError(f"a pattern stands for one target, and recipe {value.name!r} has {len(value.rules)} rules")
        return value.rules[0].target
    return Target.of(value)


def _rule(entry: Any, name: str) -> Rule:
    if not isinstance(entry, dict) or "match" not in entry or "weight" not in entry:
        raise ValueError(f"recipe {name!r}: a rule needs 'match' and 'weight' (null to leave the layer), got {entry!r}")
    fields = {key: value for key, value in entry.items() if key != "match"}
    return Rule(str(entry["match"]), None if entry["weight"] is None else Target.of(fields))


def _shipped() -> dict[str, Any]:
    try:
        folder = importlib.resources.files("lowbit.recipes")
    except ModuleNotFoundError:
        return {}
    return {Path(f.name).stem: f for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".yaml")}
