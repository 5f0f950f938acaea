"""Figures of matplotlib as PNG, and as SVG that takes its colours and its typeface from the page around it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

__all__ = ["ACCENT", "FILL", "INK", "LINE", "MUTED", "PAPER", "SOFT", "canvas", "legend", "png", "settle", "style", "svg"]

# Each colour plays one part. PNGs show it; in SVG it becomes the page's variable of that name, so that dark mode is the
# page's alone. Every one is told from the others by lightness, which no kind of colour blindness takes away.
INK, MUTED, LINE, ACCENT, SOFT, FILL, PAPER = (
    "#1c1c1a", "#65635d", "#d9d6cf", "#0b5cad", "#9cc2e5", "#c8c5bd", "#fefefe",
)  # fmt: skip
_PARTS = {INK: "ink", MUTED: "muted", LINE: "line", ACCENT: "accent", SOFT: "soft", FILL: "fill", PAPER: "paper"}
_SETTINGS = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif", "font.size": 11, "figure.dpi": 72,
    "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 8, "axes.titley": 1.0,
    "axes.labelsize": 11, "axes.labelcolor": MUTED, "axes.edgecolor": LINE, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.titlecolor": INK,
    "axes.facecolor": "none", "figure.facecolor": "none", "text.color": INK, "xtick.color": LINE, "ytick.color": LINE,
    "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED, "xtick.labelsize": 10.5, "ytick.labelsize": 10.5,
    "grid.color": LINE, "grid.linewidth": 0.6, "axes.unicode_minus": True, "lines.solid_capstyle": "butt",
    "savefig.facecolor": "auto",
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """How every chart looks, whatever the user's own settings are."""
    with matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the typeface of the PNG lacks
        yield


def canvas(width: float, height: float) -> Figure:
    """An empty figure of ``width`` by ``height`` pixels of a page."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=4 / 72, h_pad=4 / 72, hspace=0.06, wspace=0.05)
    return figure


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """What the colours are, in one line above the chart."""
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=10, handlelength=1,
                  handleheight=1, columnspacing=1.2, borderaxespad=0, borderpad=0.2)  # fmt: skip


def settle(figure: Figure) -> None:
    """Lay a figure out, once: from here on nothing moves."""
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def png(figure: Figure) -> bytes:
    """Two pixels for each of the page's, on white."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def svg(figure: Figure, name: str) -> str:
    """An ``svg`` element for a page; ``name`` is unique in it and begins every id."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    root = ElementTree.fromstring(text[text.index("<svg") :])
    ids: dict[str, str] = {}
    for element in root.iter():
        for inner in [child for child in element if _plain(child.tag) in ("metadata", "style")]:
            element.remove(inner)
        element.tag = _plain(element.tag)
        attributes = {_plain(key): value for key, value in element.attrib.items()}
        if element.tag == "g":
            attributes.pop("id", None)  # groups are named, and nothing refers to them
        element.attrib = {
            key: _own(key, value, lambda old: ids.setdefault(old, f"{name}-{len(ids)}")) for key, value in attributes.items()
        }
    width, height = (root.attrib.pop(side).removesuffix("pt") for side in ("width", "height"))
    root.attrib = {"viewBox": f"0 0 {width} {height}", "aria-hidden": "true", "focusable": "false"}
    return ElementTree.tostring(root, encoding="unicode")


def _plain(name: str) -> str:
    """A name of XML without its namespace, which a page does not need."""
    return name.rpartition("}")[2]


def _own(key: str, value: str, renamed: Callable[[str], str]) -> str:
    """An attribute with the page's colours and typeface, and ids that no other drawing has: matplotlib's are of addresses."""
    if key == "id":
        return renamed(value)
    if key == "href":
        return f"#{renamed(value.removeprefix('#'))}"
    if key == "clip-path":
        return re.sub(r"url\(#(.*)\)", lambda found: f"url(#{renamed(found[1])})", value)
    if key != "style":
        return value
    # One release of matplotlib says all of a typeface in one property, the next in three.
    value = re.sub(r"font: (?:(\w+) )?([\d.]+)px [^;]+", lambda found: f"font-size: {found[2]}px{_weight(found[1])}", value)
    value = re.sub(r"font-family: [^;]+; ?", "", value)
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{_PARTS[found[0]]})" if found[0] in _PARTS else found[0], value)


def _weight(word: str | None) -> str:
    return "; font-weight: 600" if word in ("bold", "700", "600") else ""
