"""The better ways to choose codes, and to rewrite the model before, in one line each:
``quantize_(model, gptq("int3"), calibration=...)``."""

from __future__ import annotations

from typing import Any

from .layer_config import LayerConfig
from .recipe import Recipe, RecipeLike

__all__ = ["awq", "clip", "gptq", "hqq", "rotation", "smoothquant"]


def gptq(recipe: RecipeLike, **options: Any) -> LayerConfig | Recipe:
    """``recipe`` rounded by GPTQ (Frantar et al. 2022): each column's error is made up for by the columns behind it, on
    calibration data.

    Args:
        recipe: a layer config, a scheme or the name of one (gives a :class:`~lowbit.LayerConfig`), or anything else that
            :func:`lowbit.quantize_` takes (gives a :class:`~lowbit.Recipe` in which every rule is rounded so).
        options: of the rounder, as ``lowbit.algorithms.ROUNDERS["gptq"].options`` lists them.

    Raises ``ValueError`` for an option that it does not have.
    """
    return _rounded_by("gptq", recipe, options)


def hqq(recipe: RecipeLike, **options: Any) -> LayerConfig | Recipe:
    """``recipe`` rounded by half-quadratic quantization (Badri and Shaji 2023), which looks at no data.

    Args:
        recipe: as that of :func:`gptq`.
        options: ``p``, ``beta`` and ``steps``, as :func:`lowbit.algorithms.hqq.hqq` takes them.

    Raises ``ValueError`` for an option that it does not have.
    """
    return _rounded_by("hqq", recipe, options)


def clip(recipe: RecipeLike, **options: Any) -> LayerConfig | Recipe:
    """``recipe`` rounded to nearest within ranges that are searched for the least squared error, that of the outputs where
    there is calibration data.

    Args:
        recipe: as that of :func:`gptq`.
        options: ``passes``, how often groups are gone over.

    Raises ``ValueError`` for an option that it does not have.
    """
    return _rounded_by("clip", recipe, options)


def rotation(recipe: RecipeLike, **options: Any) -> Recipe:
    """``recipe`` behind a rotation of the residual stream (QuaRot: Ashkboos et al. 2024): an orthogonal matrix is folded into the
    weights that spreads every channel over all of them. It needs no data.

    Args:
        recipe: as that of :func:`awq`.
        options: ``online=True`` also rotates what down projections read, as the model runs; ``seed`` draws the signs of the
            matrix.

    Raises ``ValueError`` for an option that it does not have.
    """
    return _rewritten_by("rotation", recipe, options)


def awq(recipe: RecipeLike, **options: Any) -> Recipe:
    """``recipe`` behind AWQ (Lin et al. 2023): what layers read is divided, and their weights are multiplied, by a power of the
    inputs' size that is searched on calibration data, so that the weights that matter most lose least.

    Args:
        recipe: anything that :func:`lowbit.quantize_` takes, with a rounder or without: ``awq(gptq("int3"))``.
        options: of the rewrite, as ``lowbit.rewrites.REWRITES["awq"].options`` lists them.

    Raises ``ValueError`` for an option that it does not have.
    """
    return _rewritten_by("awq", recipe, options)


def smoothquant(recipe: RecipeLike, **options: Any) -> Recipe:
    """``recipe`` behind SmoothQuant (Xiao et al. 2022): what layers read is divided, and their weights are multiplied, so that
    few large channels do not cost the others their precision when inputs are rounded.

    Args:
        recipe: as that of :func:`awq`.
        options: ``alpha`` says how much the weights take, 0 to 1, and ``alpha="auto"`` searches it for each input.

    Raises ``ValueError`` for an option that it does not have.
    """
    return _rewritten_by("smoothquant", recipe, options)


def _rounded_by(rounder: str, recipe: RecipeLike, options: dict[str, Any]) -> LayerConfig | Recipe:
    found = Recipe.of(recipe).rounded_by(rounder, **options)
    (first, *others) = found.rules
    alone = not others and first.catch_all and first.blocks is None and first.config is not None
    return first.config if alone and first.config is not None else found


def _rewritten_by(rewrite: str, recipe: RecipeLike, options: dict[str, Any]) -> Recipe:
    return Recipe.of(recipe).rewritten(rewrite, **options)
