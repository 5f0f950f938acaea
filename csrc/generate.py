"""Writes csrc/formats.h from lowbit/formats.py: ``python csrc/generate.py``."""

from __future__ import annotations

import math
from pathlib import Path

from lowbit.decoding import INTEGERS
from lowbit.formats import FORMATS, Format

HEADER = Path(__file__).with_name("formats.h")

_HEAD = """\
// Generated from lowbit/formats.py by `python csrc/generate.py`; edit that file, not this one.
//
// Each format: the bits of a code, whether it is a plain integer (values[code] is the code, as two's complement where
// it is signed), and the number of every code.
#pragma once

#include <limits>

namespace lowbit::formats {
"""


def _literal(value: float) -> str:
    """A float literal that means ``value`` rounded to float32."""
    if math.isnan(value):
        return "std::numeric_limits<float>::quiet_NaN()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}std::numeric_limits<float>::infinity()"
    return f"{value!r}f"


def _wrapped(words: list[str], width: int = 116) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def _struct(fmt: Format) -> str:
    values = "\n".join("      " + line for line in _wrapped([_literal(v) + "," for v in fmt.values]))
    integer = fmt.decoding.kind == INTEGERS and fmt.decoding.factor == 1
    return f"""
struct {fmt.name} {{
  static constexpr int bits = {fmt.bits};
  static constexpr bool is_integer = {str(integer).lower()};
  static constexpr bool is_signed = {str(fmt.signed).lower()};
  static constexpr float values[{len(fmt.values)}] = {{
{values}
  }};
}};
"""


def header() -> str:
    """The text of formats.h."""
    return _HEAD + "".join(_struct(fmt) for fmt in FORMATS.values()) + "\n}  // namespace lowbit::formats\n"


if __name__ == "__main__":
    HEADER.write_text(header())
