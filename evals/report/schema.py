"""Results as they come from files: read, and held against what a result is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "ReportError", "check", "check_speeds", "is_speeds", "read_json"]

FORMAT = "lowbit-eval/1"
"""What stands under ``format`` in a result that :func:`check` takes."""


class ReportError(ValueError):
    """A result that a report cannot be made from."""


# A result, field by field. A name that ends in "?" may be missing or null, "*" stands for any name, a list for any
# number of its one element, a word for a leaf.
_COUNTS = {"*": "count"}
_DIFFERENCE = {
    "n": "count", "difference": "number", "low": "number", "high": "number", "gained": "count", "lost": "count",
    "mcnemar?": "fraction", "holm?": "fraction", "questions_for_one_point?": "number",
}  # fmt: skip
_TASK = {
    "metric?": "text", "n": "count", "value?": "fraction", "stderr?": "number",
    "subjects?": {"*": {"n": "count", "value?": "fraction"}}, "difference?": _DIFFERENCE,
    "samples?": [{"id": "text", "subject?": "text", "right": "flag"}],
}  # fmt: skip
_OUTCOME = {
    "recipe": "text", "bits_per_weight": "number", "file_bytes?": "count",
    "size?": {"codes": "count", "scales": "count", "float": "count"},
    "perplexity?": {"value?": "number", "tokens?": "count", "chunks?": "count", "context?": "count"},
    "tasks?": {"*": _TASK},
    "divergence?": {"kl?": "number", "kl_low?": "number", "kl_high?": "number", "agreement?": "fraction", "tokens?": "count"},
    "layers?": [{"name": "text", "scheme?": "text", "bits_per_weight?": "number", "sqnr_db?": "number"}],
    "histograms?": [{"name": "text", "edges": ["number"], "before": ["number"], "after": ["number"], "grid?": ["number"]}],
    "kernels?": {"decode?": _COUNTS, "prompt?": _COUNTS},
    "speed?": {"tokens_per_second?": "number", "first_token?": "number"},
    "seconds?": "number",
}  # fmt: skip
_GEMV_ROW = {
    "scheme": "text", "kernel?": "text", "m": "count", "n": "count", "k": "count", "billion_weights_per_second": "number",
    "limit_us": "number", "fraction_of_limit": "number",
}  # fmt: skip
_GEMV = {"device?": "text", "dtype?": "text", "rows": [_GEMV_ROW]}
_ORIGIN = {
    "date?": "text", "commit?": "text", "versions?": {"*": "text"}, "cpu?": {"name?": "text", "threads?": "count"},
    "gpus?": ["text"],
}  # fmt: skip
_RESULT = {
    "format": "text", "model": "text", "tasks?": ["text"], "date?": "text", "seconds?": "number", "origin?": _ORIGIN,
    "outcomes": [_OUTCOME], "gemv?": _GEMV,
}  # fmt: skip


def _is_number(value: Any) -> bool:
    """A float of any kind, or an integer that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


_LEAVES = {
    "text": ("a text", lambda value: isinstance(value, str)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "number": ("a number", _is_number),
    "count": ("a count", lambda value: isinstance(value, int) and _is_number(value) and value >= 0),
    "fraction": ("between 0 and 1", lambda value: _is_number(value) and 0 <= value <= 1),
}


def read_json(path: str | Path) -> Any:
    """What the file ``path`` holds; :class:`ReportError` names it where it cannot be read."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is no JSON: {error}") from None


def is_speeds(found: Any) -> bool:
    """Whether ``found`` is of ``lowbit bench gemv`` rather than of ``lowbit eval``."""
    return isinstance(found, dict) and "format" not in found and "rows" in found


def check_speeds(figures: Any, name: str) -> None:
    """:class:`ReportError` where ``figures`` are none of ``lowbit bench gemv``, as of :func:`check`."""
    _check(figures, {**_ORIGIN, **_GEMV}, name, "")


def check(result: Any, name: str) -> None:
    """:class:`ReportError` where ``result`` is none, with ``name`` and the path of the first field that is wrong."""
    found = result.get("format") if isinstance(result, dict) else None
    if found != FORMAT:
        raise ReportError(f"{name} is no result of lowbit eval: its field format must be {FORMAT!r}, got {_shown(found)}")
    _check(result, _RESULT, name, "")
    if not result["outcomes"]:
        raise ReportError(f"{name}: outcomes is empty, so there is nothing to report")
    for i, outcome in enumerate(result["outcomes"]):
        for j, histogram in enumerate(outcome.get("histograms") or ()):
            bins = len(histogram["edges"]) - 1
            for field in ("before", "after"):
                if bins < 1 or len(histogram[field]) != bins:
                    where = f"outcomes[{i}].histograms[{j}].{field}"
                    raise ReportError(f"{name}: {where} must have one number fewer than edges, got {len(histogram[field])}")


def _check(value: Any, wanted: Any, name: str, where: str) -> None:
    if isinstance(wanted, str):
        words, holds = _LEAVES[wanted]
        if not holds(value):
            raise ReportError(f"{name}: {where} must be {words}, got {_shown(value)}")
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            raise ReportError(f"{name}: {where} must be a list, got {_shown(value)}")
        for i, item in enumerate(value):
            _check(item, wanted[0], name, f"{where}[{i}]")
    elif not isinstance(value, dict):
        raise ReportError(f"{name}: {where} must be an object, got {_shown(value)}")
    elif "*" in wanted:
        for key, item in value.items():
            _check(item, wanted["*"], name, f"{where}.{key}")
    else:
        for field, inner in wanted.items():
            key, optional = field.rstrip("?"), field.endswith("?")
            at = f"{where}.{key}".lstrip(".")
            if value.get(key) is None and optional:
                continue
            if key not in value:
                raise ReportError(f"{name}: {at} is missing")
            _check(value[key], inner, name, at)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
