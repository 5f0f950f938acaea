"""Which tests run: those of a GPU where there is one, slow ones where they are asked for, and of large products a sample."""

from __future__ import annotations

import dataclasses
import zlib
from collections import defaultdict
from typing import Any

import pytest

NO_GPU = "need a CUDA device, and there is none here"
SLOW = "are slow, or beyond the sample of a product of parameters: `make test-all` runs them"


def choose(items: list[pytest.Item], gpu: bool, slow: bool) -> tuple[list[pytest.Item], dict[str, list[pytest.Item]]]:
    """Those of ``items`` that run, and the others by the reason why not."""
    left: dict[str, list[pytest.Item]] = {}
    if not gpu:
        left[NO_GPU] = [item for item in items if item.get_closest_marker("gpu")]
        items = [item for item in items if not item.get_closest_marker("gpu")]
    if not slow:
        beyond = further(items)
        left[SLOW] = [item for item in items if item in beyond or item.get_closest_marker("slow")]
        items = [item for item in items if item not in beyond and not item.get_closest_marker("slow")]
    return items, {reason: others for reason, others in left.items() if others}


def further(items: list[pytest.Item]) -> set[pytest.Item]:
    """Cases of tests marked ``sampled`` that are beyond the sample."""
    products: dict[tuple[str, str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            each = repr(values(item).get(mark.kwargs.get("each")))
            products[item.nodeid.partition("[")[0], each, mark.kwargs.get("count", len(items))].append(item)
    return {item for (*_, count), cases in products.items() for item in set(cases).difference(sample(cases)[:count])}


def sample(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Few of the cases, the same ones each time, in which every value of every parameter occurs that occurs in all of them: those
    that hold most of what is missing come first."""
    reported = {case: features(values(case)) for case in sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))}
    missing = set[tuple[str, ...]]().union(*reported.values())
    chosen = []
    while missing:
        chosen.append(max(reported, key=lambda case: len(missing & reported[case])))
        missing -= reported[chosen[-1]]
    return chosen


def values(item: pytest.Item) -> dict[str, Any]:
    """What a test is called with, by the names of its parameters."""
    call = getattr(item, "callspec", None)
    return {} if call is None else call.params


def features(parameters: dict[str, Any]) -> set[tuple[str, ...]]:
    """(parameter, value), and (parameter, key, value) of parameters that are dicts or dataclasses, such as schemes."""
    found: set[tuple[str, ...]] = set()
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, dict):
            found |= {(name, str(key), repr(part)) for key, part in value.items()}
        else:
            found.add((name, repr(value)))
    return found
