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
from typing import Any

import yaml

from . import api
from .scheme import SCHEMES, Scheme, UnknownSchemeError
from .target import Target

__all__ = ["Recipe", "Rule"]


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
        if text in api.__all__:
            return Recipe((Rule("*", getattr(api, text)()),), text)
        try:
            return Recipe((Rule("*", Target(Scheme.parse(text))),), text)
        except UnknownSchemeError:
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
    return getattr(api, value)() if value in api.__all__ else Target.of(value)


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
