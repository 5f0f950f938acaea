"""Recipes: which layers become what, and how the model is rewritten before. Rules from name patterns to layer configs; the first
that matches wins."""

from __future__ import annotations

import difflib
import fnmatch
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import yaml

from . import api
from .algorithms import ROUNDERS
from .layer_config import FIELDS, LayerConfig, LayerConfigLike
from .rewrite import Rewrite
from .rewrites import REWRITES
from .scheme import SCHEMES, Scheme, UnknownSchemeError

__all__ = ["Recipe", "RecipeLike", "Rule", "block_counts", "block_of", "name_matches", "split_recipes"]

_ANOTHER = "\0"  # which no parameter is called


def block_of(name: str) -> tuple[str, int] | None:
    """The stack and the number of the block that a layer stands in: the first number in its name. None outside of any."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if place is None else (".".join(parts[:place]), int(parts[place]))


def block_counts(names: Iterable[str]) -> dict[str, int]:
    """How many blocks each stack of a model has, from the names of its layers: ``{"model.layers": 32}``."""
    counts: dict[str, int] = {}
    for stack, number in filter(None, map(block_of, names)):
        counts[stack] = max(counts.get(stack, 0), number + 1)
    return counts


@dataclass(frozen=True)
class Rule:
    """A pattern of layer names and what becomes of them; None leaves them as they are.

    Attributes:
        pattern: a glob over the whole name (``*`` crosses dots), or ``re:`` and a regular expression that is searched.
        config: what the layers become.
        blocks: only those in these blocks of the model, counted from 0, or from -1 backwards as Python does; None: in any
            and in none. The first number in a layer's name is that of its block.
        optional: the pattern may match nothing, in a recipe that is for models of several kinds.
    """

    pattern: str
    config: LayerConfig | None
    blocks: tuple[int, ...] | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.pattern.startswith("re:"):
            try:
                re.compile(self.pattern[3:])
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None
        if self.blocks is not None and (not self.blocks or any(type(block) is not int for block in self.blocks)):
            raise ValueError(f"blocks must be numbers such as [0, 1, -1], got {list(self.blocks)!r:.80}")

    def matches(self, name: str, counts: Mapping[str, int] | None = None) -> bool:
        """Whether the rule takes the layer called ``name`` of a model with these :func:`block_counts`."""
        if self.blocks is not None:
            place = block_of(name)
            if place is None or not {place[1], place[1] - (counts or {}).get(place[0], 0)} & set(self.blocks):
                return False
        if self.pattern.startswith("re:"):
            return re.search(self.pattern[3:], name) is not None
        return fnmatch.fnmatchcase(name, self.pattern)

    def names(self, name: str, counts: Mapping[str, int] | None = None) -> bool:
        """Whether the rule takes ``name`` for its last part too: it would not take another parameter of the same module."""
        return self.matches(name, counts) and not self.matches(f"{name.rpartition('.')[0]}.{_ANOTHER}", counts)

    def __str__(self) -> str:
        return repr(self.pattern) + ("" if self.blocks is None else f" in the blocks {', '.join(map(str, self.blocks))}")

    @property
    def catch_all(self) -> bool:
        """Whether it takes every name; such a rule leaves embeddings, heads and their like alone."""
        return self.pattern in ("*", "re:", "re:.*")


@dataclass(frozen=True)
class Recipe:
    """An ordered list of rules, of which the first whose pattern matches a layer's name decides, and how the float model is
    rewritten before, if at all: rewrites of the whole model come first, and otherwise each on what the one before it gives.

    ``keep`` names modules that stay as they are whatever the rules say, as transformers' ``modules_to_not_convert`` does
    (:func:`name_matches`)."""

    rules: tuple[Rule, ...]
    name: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in self.keep:
            if not isinstance(key, str) or not key:
                raise ValueError(f"what is kept has a name, got {key!r:.80}")
            try:
                re.compile(key)
            except re.error as error:
                raise ValueError(f"{key!r} in what is kept is neither a name nor a regular expression: {error}") from None
        if not self.rules:
            raise ValueError("a recipe needs at least one rule")
        names = [rewrite.name for rewrite in self.rewrites]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"a recipe rewrites with each method once, and has {twice} {names.count(twice)} times")

    @staticmethod
    def of(value: RecipeLike) -> Recipe:
        """A recipe from anything that :func:`lowbit.quantize_` takes.

        A recipe; a layer config or scheme (for every layer); a name (:meth:`parse`); a path; a mapping from patterns to
        layer configs, schemes, names or None; a :class:`lowbit.Config`.
        """
        if isinstance(value, Recipe):
            return value
        if isinstance(found := getattr(value, "recipe", None), Recipe):  # of a Config, which only transformers has
            return found
        if isinstance(value, Path):
            return Recipe.from_file(value)
        if isinstance(value, str):
            return Recipe.parse(value)
        if isinstance(value, Mapping):
            return Recipe(tuple(Rule(str(pattern), _config_or_none(value)) for pattern, value in value.items()))
        return Recipe((Rule("*", LayerConfig.of(value)),))  # type: ignore[arg-type] # whose error says what it is instead

    @staticmethod
    def parse(text: str) -> Recipe:
        """A recipe by name: a scheme (``int4_g64``), a factory (``int8_weight_only``), a file, or one in ``recipes/``; or any
        of these in the hands of a rounder or behind a rewrite, ``gptq(int3, damping=0.05)`` or ``awq(gptq(int3))``."""
        if match := re.fullmatch(r"(\w+)\((.+)\)", text.strip()):
            return _by_method(*match.groups())
        if text in api.__all__:
            return Recipe((Rule("*", getattr(api, text)()),), text)
        try:
            return Recipe((Rule("*", LayerConfig(Scheme.parse(text))),), text)
        except UnknownSchemeError:
            pass
        if text.endswith((".yaml", ".yml", ".json")):
            return Recipe.from_file(Path(text))
        bundled = _bundled()
        if text in bundled:
            return Recipe.from_text(bundled[text].read_text(encoding="utf-8"), text)
        closest = difflib.get_close_matches(text, [*SCHEMES, *api.__all__, *bundled], n=4, cutoff=0.3)
        raise ValueError(f"no scheme, recipe or file named {text!r}; did you mean {', '.join(closest or SCHEMES)}?")

    def rounded_by(self, rounder: str, **options: Any) -> Recipe:
        """This recipe with the codes of every rule chosen by ``rounder``, a key of ``lowbit.algorithms.ROUNDERS``.

        Raises ``ValueError`` for a rounder or an option that does not exist.
        """

        def with_rounder(rule: Rule) -> Rule:
            if rule.config is None:
                return rule
            # How scales are chosen is an option of round-to-nearest.
            scales = rule.config.scales if rounder == "rtn" else "range"
            return replace(rule, config=rule.config.replace(rounder=rounder, options=tuple(options.items()), scales=scales))

        return replace(self, rules=tuple(map(with_rounder, self.rules)))

    def rewritten(self, rewrite: str, **options: Any) -> Recipe:
        """This recipe behind ``rewrite``, a key of ``lowbit.rewrites.REWRITES``, which comes before any that it has already.

        Raises ``ValueError`` for a rewrite or an option that does not exist, and for one that the recipe has.
        """
        return replace(self, rewrites=(Rewrite(rewrite, tuple(options.items())), *self.rewrites))

    def with_keep(self, names: Iterable[str]) -> Recipe:
        """This recipe, with the modules of these ``names`` left as they are (:attr:`keep`)."""
        if isinstance(names, str):
            raise TypeError(f"the names of what is kept stand in a list, got {names!r:.80}")
        return replace(self, keep=tuple(dict.fromkeys((*self.keep, *names))))

    @property
    def needs_data(self) -> str:
        """What of it cannot be found without calibration data; empty where nothing is."""
        rewrite = next((rewrite for rewrite in self.rewrites if rewrite.method.needs_data), None)
        if rewrite is not None:
            return f"the rewrite {rewrite.name}"
        configs = (rule.config for rule in self.rules)
        return next((config.needs_data for config in configs if config is not None and config.needs_data), "")

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
        except (yaml.YAMLError, RecursionError) as error:
            quotes = "; a pattern that begins with * stands in quotes" if "alias" in str(error) else ""
            raise ValueError(f"recipe {name!r} is not YAML: {error}{quotes}".replace("\n", " ")) from None
        if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
            raise ValueError(f"recipe {name!r} needs a list 'rules' of entries with 'match' and 'weight'")
        if unknown := sorted(map(str, data.keys() - {"name", "rewrites", "rules", "keep"})):
            raise ValueError(f"recipe {name!r}: unknown field {', '.join(unknown)}; there are name, rewrites, rules and keep")
        for field, example in (("rewrites", "[awq]"), ("keep", "[lm_head]")):
            if not isinstance(data.get(field, []), list):
                raise ValueError(f"recipe {name!r}: {field} must be a list such as {example}, got {data[field]!r:.80}")
        rules = tuple(_rule(entry, f"recipe {name!r}, rule {i}") for i, entry in enumerate(data["rules"], 1))
        try:
            rewrites = tuple(map(Rewrite.of, data.get("rewrites", [])))
            return Recipe(rules, str(data.get("name", name)), rewrites, tuple(data.get("keep", [])))
        except ValueError as error:
            raise ValueError(f"recipe {name!r}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as :meth:`from_text` reads it."""
        rewrites = {"rewrites": [rewrite.to_plain() for rewrite in self.rewrites]} if self.rewrites else {}
        keep = {"keep": list(self.keep)} if self.keep else {}
        return {"name": self.name, **rewrites, **keep, "rules": [_rule_to_dict(rule) for rule in self.rules]}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def rule_for(self, names: Iterable[str], counts: Mapping[str, int] | None = None) -> Rule | None:
        """The first rule that matches one of a layer's names, in a model with these :func:`block_counts`."""
        names = tuple(names)
        return next((rule for rule in self.rules if any(rule.matches(name, counts) for name in names)), None)


class _HasRecipe(Protocol):
    """A :class:`lowbit.Config`, which only transformers has."""

    recipe: Recipe | None


RecipeLike: TypeAlias = Recipe | LayerConfigLike | Path | Mapping[str, LayerConfigLike | None] | _HasRecipe
"""What :meth:`Recipe.of`, and so every ``value``, takes."""


def name_matches(key: str, name: str) -> bool:
    """Whether ``key`` of transformers' ``modules_to_not_convert`` names the module ``name``: it is the name, or that of a module
    that it stands in (``"model.vision"`` of ``"model.vision.fc"``), or a regular expression of these, or how the name ends."""
    return re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", name) is not None or name.endswith(key)


def _by_method(method: str, inside: str) -> Recipe:
    """``int3, damping=0.05`` in the hands of a rounder, or behind a rewrite."""
    if not ROUNDERS.has(method) and not REWRITES.has(method):
        raise ValueError(f"no rounder or rewrite named {method!r}; there are {', '.join((*ROUNDERS, *REWRITES))}")
    text, *settings = split_recipes(inside)
    options = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ValueError(f"an option of {method} is written name=value, got {setting!r:.80}")
        options[name] = yaml.safe_load(value)
    found = Recipe.parse(text)
    found = found.rounded_by(method, **options) if method in ROUNDERS else found.rewritten(method, **options)
    return replace(found, name=f"{method}({inside})")


def split_recipes(text: str) -> list[str]:
    """``text`` at its commas, but for those inside of brackets: ``gptq(int3, damping=0.05), int4`` is two recipes."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _config_or_none(value: Any) -> LayerConfig | None:
    if value is None:
        return None
    if isinstance(value, Recipe):
        if len(value.rules) != 1:
            raise ValueError(f"a pattern stands for one layer config, and recipe {value.name!r} has {len(value.rules)} rules")
        if value.keep:
            raise ValueError(
                f"a pattern stands for one layer config, and the recipe {value.name!r} keeps {', '.join(value.keep)}"
            )
        if value.rewrites:
            name = value.rewrites[0].name
            raise ValueError(
                f"{name} rewrites the whole model and no single layer: write {name}({{pattern: ...}}) around them all"
            )
        return value.rules[0].config
    if isinstance(value, str) and "(" in value:
        return _config_or_none(Recipe.parse(value))
    return getattr(api, value)() if value in api.__all__ else LayerConfig.of(value)


_RULE_FIELDS = ("match", *FIELDS, "blocks", "optional")


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict) or "match" not in entry or "weight" not in entry:
        raise ValueError(f"{where}: a rule needs 'match' and 'weight' (null to leave the layer), got {entry!r:.200}")
    if unknown := [str(key) for key in entry if key not in _RULE_FIELDS]:
        raise ValueError(f"{where}: unknown field {', '.join(unknown)}; there are {', '.join(_RULE_FIELDS)}")
    fields = {key: value for key, value in entry.items() if key not in ("match", "blocks", "optional")}
    for key, value in {"match": entry["match"], **fields}.items():
        if key != "options" and not isinstance(value, str) and (value is not None or key not in ("weight", "activation")):
            raise ValueError(f"{where}: {key} must be a name, got {value!r:.80}")
    if entry["weight"] is None and len(fields) > 1:
        raise ValueError(f"{where}: a layer that is left (weight: null) takes no {', '.join(sorted(fields.keys() - {'weight'}))}")
    blocks, optional = entry.get("blocks"), entry.get("optional", False)
    if blocks is not None and not isinstance(blocks, list):
        raise ValueError(f"{where}: blocks must be a list such as [0, 1, -1], got {blocks!r:.80}")
    if not isinstance(optional, bool):
        raise ValueError(f"{where}: optional must be true or false, got {optional!r:.80}")
    try:
        config = None if entry["weight"] is None else LayerConfig.of(fields)
        return Rule(entry["match"], config, None if blocks is None else tuple(blocks), optional)
    except ValueError as error:
        raise ValueError(f"{where} ({entry['match']!r}): {error}") from None


def _rule_to_dict(rule: Rule) -> dict[str, Any]:
    found: dict[str, Any] = {"match": rule.pattern, **({"weight": None} if rule.config is None else rule.config.to_dict())}
    if rule.blocks is not None:
        found["blocks"] = list(rule.blocks)
    if rule.optional:
        found["optional"] = True
    return found


def _bundled() -> dict[str, Any]:
    try:
        folder = importlib.resources.files("lowbit.recipes")
    except ModuleNotFoundError:
        return {}
    return {Path(f.name).stem: f for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".yaml")}
