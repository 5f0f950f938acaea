"""Layers that are alike under one name."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from lowbit.layer_groups import elided, grouped

PARTS = st.sampled_from(("layers", "mlp", "up", "0", "1", "2", "7", "10"))


@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), unique=True, max_size=20))
def test_every_layer_is_in_one_group_that_names_it(names: list[str]) -> None:
    groups = grouped(names, lambda name: name, lambda name: None)
    assert sorted(name for _, group in groups for name in group) == sorted(names)
    for shown, group in groups:
        if len(group) == 1:
            assert shown == group[0]
        for name in group:
            for part, span in zip(name.split("."), shown.split("."), strict=True):
                spans = [tuple(map(int, s.split("-"))) for s in span.split(",")] if re.fullmatch(r"[\d,-]+", span) else []
                assert part == span or any(s[0] <= int(part) <= s[-1] for s in spans)


def test_what_differs_stands_apart() -> None:
    names = ["a.0.x", "a.1.x", "a.2.x", "a.3.x"]
    groups = grouped(names, lambda name: name, lambda name: name == "a.2.x")
    assert [shown for shown, _ in groups] == ["a.0-1,3.x", "a.2.x"]


@given(st.text(max_size=30), st.integers(3, 40))
def test_elided_text_fits(text: str, width: int) -> None:
    shown = elided(text, width)
    assert len(shown) <= width
    assert shown == text or "…" in shown
