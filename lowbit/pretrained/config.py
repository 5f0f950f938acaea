"""What stands under ``quantization_config``: a recipe in a call of from_pretrained, a note in a folder's config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as missing:
    raise ImportError("lowbit.Config needs transformers: pip install 'lowbit[models]'") from missing

if TYPE_CHECKING:
    from ..recipe import Recipe

__all__ = ["METHOD", "Config", "QuantizedFolderConfig"]


class _Method(str):
    """A name, as transformers wants it, with the ``value`` that diffusers reads of an enumeration's member."""

    @property
    def value(self) -> str:
        return str(self)


METHOD = _Method("lowbit")


class UnreadRecipe(NamedTuple):
    """What a config.json says of a recipe, as it stands there, and the reason why that is none here: a plug-in is missing, or the
    lowbit that wrote it is newer."""

    recipe: Any
    reason: str


class Config(QuantizationConfigMixin):
    """Quantize a model while transformers loads it: ``from_pretrained(ID, quantization_config=lowbit.Config("int4"))``.

    Args:
        recipe: anything that :func:`lowbit.quantize_` takes: the name of a scheme or recipe, a YAML file, a
            :class:`lowbit.Recipe`, what a factory such as ``int4_weight_only()`` returns, a dict from patterns to those.
        modules_to_not_convert: names of modules that stay as they are, beside those that the recipe leaves (heads, embeddings,
            what transformers keeps in float32), as transformers' other configurations take them: a name or the beginning of
            one up to a dot, a regular expression of these, or how a name ends.

    Each weight is quantized as soon as it is read, so that memory holds the quantized model and one float weight (and
    embeddings that are tied, until the end). ``model.hf_quantizer.plan`` is the :class:`~lowbit.plans.Plan` that was
    carried out. Raises ``ValueError`` for a recipe that does not exist, and while loading for a name that no module has.
    """

    quant_method: Any = METHOD
    recipe: Recipe | None
    unread: UnreadRecipe | None = None

    def __init__(self, recipe: Any, modules_to_not_convert: Iterable[str] | None = None) -> None:
        from ..recipe import Recipe

        self.recipe = Recipe.of(recipe).with_keep(modules_to_not_convert or ())

    @property
    def modules_to_not_convert(self) -> list[str] | None:
        """The names of modules that stay as they are."""
        return list(self.recipe.keep) if self.recipe is not None and self.recipe.keep else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which :meth:`from_dict` takes."""
        from ..checkpoint.header import VERSION

        recipe = {} if self.recipe is None else {"recipe": self.recipe.to_dict()}
        return {"quant_method": METHOD, "version": VERSION, **recipe}

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """A configuration from what :meth:`to_dict` gave; a ``recipe`` by name will do as well."""
        if cls is Config:
            return QuantizedFolderConfig.from_dict(config_dict, return_unused_kwargs, **kwargs)
        config = cls(_read(config_dict.get("recipe")))
        if names := config_dict.get("modules_to_not_convert"):
            if config.recipe is None:
                raise ValueError(f"modules_to_not_convert {names!r:.80} says what a recipe leaves, and there is no recipe")
            config.recipe = config.recipe.with_keep(names)
        return (config, kwargs) if return_unused_kwargs else config


class QuantizedFolderConfig(Config):
    """What config.json of a quantized folder says. The tensors' own header says what each of them is; ``recipe``, which
    may be None, is what they were made by (``unread`` where that names methods that are not known here, which the tensors
    do not need), and ``facts`` what else is known of that, for people to read:

    * ``bits_per_weight``: of the layers that are quantized, scales included;
    * ``calibration``: the rows, and of token ids the tokens, of the data that was looked at; absent where none was;
    * ``lowbit_version``: of the library that quantized;
    * ``base_model``: the name of the float model.
    """

    _FACTS = ("bits_per_weight", "calibration", "lowbit_version", "base_model")

    def __init__(self, recipe: Any = None, modules_to_not_convert: Iterable[str] | None = None) -> None:
        self.recipe = None
        self.facts: dict[str, Any] = {}
        if recipe is not None:
            super().__init__(recipe, modules_to_not_convert)

    @classmethod
    def describe(cls, recipe: Any, facts: Mapping[str, Any], unread: UnreadRecipe | None = None) -> QuantizedFolderConfig:
        """Of a model that ``recipe`` made, and what is known of that."""
        config = cls(recipe)
        config.facts, config.unread = dict(facts), unread
        return config

    def to_dict(self) -> dict[str, Any]:
        unread = {} if self.unread is None else {"recipe": self.unread.recipe}
        return {**super().to_dict(), **unread, **self.facts}

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        unread = None
        try:
            found = super().from_dict(config_dict, return_unused_kwargs, **kwargs)
        except (TypeError, ValueError) as error:
            recipe = config_dict.get("recipe")
            if recipe is None:
                raise
            unread = UnreadRecipe(recipe, str(error))
            found = super().from_dict({}, return_unused_kwargs, **kwargs)
        config = found[0] if return_unused_kwargs else found
        config.facts, config.unread = {name: config_dict[name] for name in cls._FACTS if name in config_dict}, unread
        return found


def _read(recipe: Any) -> Any:
    from ..recipe import Recipe

    if isinstance(recipe, Mapping) and isinstance(recipe.get("rules"), list):
        return Recipe.from_text(json.dumps(recipe))
    return recipe
