"""Options by name, as recipes hold them: of rounders and of rewrites."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Options", "keyword_options", "normalized_options"]

Options = tuple[tuple[str, Any], ...]


def keyword_options(function: Callable[..., Any]) -> dict[str, Any]:
    """The options that ``function`` takes by name alone, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def normalized_options(who: str, options: Options, known: Mapping[str, Any], check: Callable[..., None]) -> Options:
    """``options`` of the method ``who`` as sorted pairs. Raises ``ValueError`` for one that is not ``known``, and for values
    that no file could hold, that are of another kind than the default in ``known``, or that ``check(**options)`` refuses."""
    found = {name: _number(value) for name, value in dict(options).items()}
    if unknown := sorted(found.keys() - known.keys()):
        there = f"there are {', '.join(known)}" if known else "it takes none"
        raise ValueError(f"{who} has no option {', '.join(map(str, unknown))}; {there}")
    for name, value in found.items():
        if not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"option {name} of {who} must be a number, true, false or a word, got {value!r:.80}")
    try:
        check(**found)
    except TypeError as error:  # a word where it compares numbers
        values = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ValueError(f"{who} cannot take {values:.200}: {error}") from None
    for name, value in found.items():
        if isinstance(value, bool) != isinstance(known[name], bool) and isinstance(known[name], (bool, int, float)):
            kind = "true or false" if isinstance(known[name], bool) else "a number"
            raise ValueError(f"option {name} of {who} must be {kind}, got {value!r:.80}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"option {name} of {who} must be finite, got {value}")
    return tuple(sorted(found.items()))


def _number(value: Any) -> Any:
    """``1e-5`` is a word to YAML, which wants a point in it."""
    is_exponent = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_exponent else value
