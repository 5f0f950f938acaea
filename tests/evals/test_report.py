"""The report: its page in a real browser, its words and its pictures."""

from __future__ import annotations

import copy
import html.parser
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lowbit.evals import report
from lowbit.evals.paired import paired_difference
from lowbit.evals.report import charts, page, wording
from lowbit.evals.report.entries import Runs, front
from tests.support import browser, synthetic_results

FEW = ("float", "int8", "int4", "int3")
NASTY = (
    "<script>alert(1)</script>", 'a"b\'c&d', "$x_1^2$ \\frac{", "</svg></style>", "x" * 300, "url(http://a.example/)",
    "名前\u202e", "\ud800\x00\n{{ 7*7 }}",
)  # fmt: skip


def rendered(*results: dict[str, Any]) -> str:
    """The page without its charts, which take seconds."""
    return page.render(Runs.of(results, [f"{i}.json" for i in range(len(results))]), {})


def bare() -> dict[str, Any]:
    """A result of which nothing optional was measured."""
    return {
        "format": report.FORMAT, "origin": None, "model": "m", "tasks": [], "seconds": None, "gemv": None,
        "outcomes": [{"recipe": name, "bits_per_weight": bits} for name, bits in (("float", 16.0), ("int4", 4.2))],
    }  # fmt: skip


def nasty() -> dict[str, Any]:
    """A result whose every name is a trap."""
    result = synthetic_results.result(5, FEW, n=60, layers=7)
    result["model"] = NASTY[0]
    for outcome, name in zip(result["outcomes"][1:], NASTY[1:], strict=False):
        outcome["recipe"] = name
    for outcome in result["outcomes"]:
        for part, name in zip(outcome["layers"], NASTY, strict=False):
            part["name"] = name
        for part in outcome["histograms"]:
            part["name"] = NASTY[4]
        outcome["kernels"] = {"decode": dict.fromkeys(NASTY, 3), "prompt": {"": 1}}
        outcome["tasks"] = {NASTY[2]: outcome["tasks"]["mmlu"]}
        outcome["tasks"][NASTY[2]]["subjects"] = {name: {"n": 1, "value": 1.0} for name in NASTY}
    for row in result["gemv"]["rows"]:
        row["scheme"] = NASTY[3]
    return result


def endless(result: dict[str, Any]) -> dict[str, Any]:
    """``result`` with numbers that are none."""
    for outcome in result["outcomes"][1:]:
        outcome["perplexity"]["value"] = math.inf
        outcome["layers"][0]["sqnr_db"] = math.inf
        outcome["layers"][1]["sqnr_db"] = None
        outcome["divergence"]["kl"] = -0.0
        outcome["speed"]["tokens_per_second"] = math.nan
        outcome["tasks"]["mmlu"]["difference"] |= {"low": math.nan, "mcnemar": None, "holm": None}
    result["outcomes"][1]["histograms"][0]["after"][3] = math.nan
    return result


def pixels(source: Any) -> Image.Image:
    with Image.open(source) as image:
        return image.convert("RGB")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages: of a run, of two (with numbers that are none), of names that are traps, of one with nothing measured."""
    second = synthetic_results.result(
        2, ("float", "int8", "nvfp4"), ("mmlu", "hellaswag"), n=120, layers=7, gemv=False, model="other/model"
    )
    results = {
        "one": [synthetic_results.result(n=200)],
        "two": [synthetic_results.result(1, FEW, ("mmlu", "hellaswag"), n=200, layers=7), endless(second)],
        "nasty": [nasty()],
        "bare": [bare()],
    }
    speeds = {
        "gemv_gpu.json": synthetic_results.speeds("NVIDIA H100 80GB HBM3"),
        "gemv_cpu.json": synthetic_results.speeds("cpu, 2 threads"),
    }
    folder = tmp_path_factory.mktemp("reports")
    return {
        name: report.write_report(found, folder / name, speeds=speeds if name == "two" else None)
        for name, found in results.items()
    }


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if browser.browser_path() is None:
        pytest.skip(f"no browser to look at the page with: install one of {', '.join(browser.NAMES)}")
    with browser.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


# Elements that reach beyond the window, where nothing about them scrolls.
OVERFLOWING = """
[...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width > 0 && !e.closest(".scroll") && (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.outerHTML.slice(0, 120))
"""
# What each figure shows: the visible drawings, how much is in them, and texts that lie beyond their edges.
DRAWN = """
[...document.querySelectorAll("figure")].map(f => [...f.querySelectorAll("svg")].map(s => {
  const box = s.getBoundingClientRect();
  const cut = [...s.querySelectorAll("text")].filter(t => {
    const b = t.getBoundingClientRect();
    return b.width > 0 && (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1);
  }).map(t => t.textContent);
  const shapes = [...s.querySelectorAll("path, use, text")].filter(e => e.getBoundingClientRect().width > 0).length;
  return {id: f.id, x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, cut, shapes};
}).filter(s => s.width > 0 && s.height > 0))
"""
COLOURS = """
(() => { const of = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
return Object.fromEntries(["paper", "ink", "muted", "accent", "loss"].map(n => [n, of("--" + n)])); })()
"""
PICTURES = {"one": 5, "two": 5, "nasty": 5, "bare": 0}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", PICTURES)
def test_the_page_in_a_browser(
    chromium: browser.Browser, reports: dict[str, Path], tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    chromium.open(reports[name], width, dark)
    assert chromium.ask("innerWidth") == width
    assert chromium.ask("document.documentElement.scrollWidth") <= width
    assert chromium.ask(OVERFLOWING) == []

    figures = chromium.ask(DRAWN)
    assert len(figures) == PICTURES[name]
    chromium.screenshot(tmp_path / "page.png")
    shot = pixels(tmp_path / "page.png")
    assert shot.width == width
    for (drawing,) in figures:  # one of the two layouts, and it is drawn
        assert drawing["width"] > 300
        assert drawing["height"] > 60
        assert drawing["shapes"] > 5
        assert drawing["cut"] == [] or name == "nasty"
        x, y = drawing["x"], drawing["y"]
        seen = shot.crop((int(x), int(y), int(x + drawing["width"]), int(y + drawing["height"])))
        assert len(seen.getcolors(1 << 24)) > 8

    assert chromium.requests == [reports[name].as_uri()]
    assert chromium.complaints == []
    colours = chromium.ask(COLOURS)
    assert (luminance(colours["paper"]) < 0.1) == dark
    for part in ("ink", "muted", "accent", "loss"):
        assert contrast(colours[part], colours["paper"]) >= 4.5, part


def luminance(colour: str) -> float:
    """After WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_details_open_without_overflow(chromium: browser.Browser, reports: dict[str, Path]) -> None:
    chromium.open(reports["one"], 400)
    chromium.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.ask("document.documentElement.scrollWidth") <= 400


def test_it_prints(chromium: browser.Browser, reports: dict[str, Path]) -> None:
    chromium.open(reports["one"], 1400, dark=True)
    assert chromium.pdf().startswith(b"%PDF")


# ---- the files -------------------------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """Every element of a page with its attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


PAGE_TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section", "figure", "div", "p", "h1", "h2",
    "span", "b", "bdi", "small", "ul", "li", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "details",
    "summary", "wbr",
}  # fmt: skip
SVG_TAGS = {"svg", "g", "defs", "path", "use", "text", "tspan", "clippath", "rect"}


def assert_harmless(text: str) -> None:
    for tag, attributes in Elements(text).found:
        assert tag in PAGE_TAGS | SVG_TAGS
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name != "src"
            assert name not in ("href", "xlink:href") or value.startswith("#")
            assert name == "aria-label" or all(place.startswith("#") for place in re.findall(r"url\((.)", value or ""))


@pytest.mark.parametrize("name", PICTURES)
def test_the_page_asks_for_nothing(reports: dict[str, Path], name: str) -> None:
    text = reports[name].read_text(encoding="utf-8")
    assert_harmless(text)
    style = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_pictures_lie_beside_the_page(reports: dict[str, Path]) -> None:
    for name, count in PICTURES.items():
        pictures = sorted(reports[name].parent.glob("*.png"))
        assert [picture.stem for picture in pictures] == sorted(charts.NAMES)[:count]
        for picture in pictures:
            image = pixels(picture)
            assert image.width == 2 * charts.WIDE
            assert name != "one" or len(image.getcolors(1 << 24)) > 20
    assert {path.name for path in reports["bare"].parent.iterdir()} == {"report.html"}


def test_the_same_result_gives_the_same_files(tmp_path: Path) -> None:
    result = synthetic_results.result(3, FEW[:2], n=40, layers=2)
    first, second = (report.write_report([copy.deepcopy(result)], tmp_path / name) for name in "ab")
    for path in first.parent.iterdir():
        assert path.read_bytes() == (second.parent / path.name).read_bytes(), path.name


NAMES = st.text(max_size=40) | st.sampled_from(NASTY)


@given(st.tuples(*8 * [NAMES]))
@settings(max_examples=40, deadline=None)
def test_names_are_text(names: tuple[str, ...]) -> None:
    result = synthetic_results.result(4, ("float", "int4"), n=8, layers=1)
    result["model"], outcome = names[0], result["outcomes"][1]
    outcome["recipe"], outcome["layers"][0]["name"] = names[1], names[2]
    outcome["kernels"] = {"decode": {names[3]: 1}, "prompt": {names[4]: 1}}
    outcome["tasks"] = {names[5]: outcome["tasks"]["mmlu"] | {"subjects": {names[6]: {"n": 1, "value": 1.0}}}}
    result["origin"]["cpu"]["name"] = names[7]
    text = rendered(result)
    text.encode("utf-8")
    assert_harmless(text)
    shown = Elements(text).text
    for name in names[1:2]:
        if name.isascii() and name.isprintable() and len(name) < 40:
            assert name in shown


@given(st.tuples(*3 * [NAMES]))
@settings(max_examples=4, deadline=None)
def test_names_in_charts_are_text(names: tuple[str, ...]) -> None:
    result = synthetic_results.result(4, ("float", "int4"), n=8, layers=2, gemv=False)
    outcome = result["outcomes"][1]
    outcome["recipe"], outcome["layers"][0]["name"], outcome["kernels"]["decode"] = names[0], names[1], {names[2]: 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "png", lambda figure: b"")  # pictures have no text
        drawn = charts.draw(Runs.of([result], ["a.json"]))
    for chart in drawn:
        for drawing in (chart.wide, chart.narrow):
            assert {element.tag.lower() for element in ElementTree.fromstring(drawing).iter()} <= SVG_TAGS


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_the_findings_in_words() -> None:
    result = bare()
    float_, int4 = result["outcomes"]
    float_["file_bytes"], int4["file_bytes"] = 4_000_000, 1_000_000
    difference = {"n": 200, "difference": -0.015, "low": -0.04, "high": 0.01, "gained": 2, "lost": 5, "mcnemar": 0.45,
                  "holm": 0.9, "questions_for_one_point": 4123}  # fmt: skip
    float_["tasks"] = {"mmlu": {"n": 200, "value": 0.5, "difference": None}}
    int4["tasks"] = {"mmlu": {"n": 200, "value": 0.485, "difference": difference}}
    shown = Elements(rendered(result)).text
    said = "int4 (4.20 bits) is one that the questions cannot tell from float (a loss of up to 4.0 points is possible): it loses"
    assert f"{said} 1.5 points on mmlu [\u22124.0, +1.0]" in shown
    assert "75\u00a0% smaller, 1.00\u00a0MB" in shown
    assert "to tell a loss of 1 point takes about 4,100 questions more than the 200 that were asked" in shown
    assert "within chance (adjusted p = 0.90)" in shown

    difference |= {"high": -0.001}
    shown = Elements(rendered(result)).text
    assert "int4 (4.20 bits) is worse than float perhaps beyond chance" in shown
    assert "in doubt (adjusted p = 0.90)" in shown

    difference |= {"holm": 0.0004, "low": -0.03}
    shown = Elements(rendered(result)).text
    assert "int4 (4.20 bits) is worse than float beyond chance" in shown
    assert "beyond chance (adjusted p < 0.001)" in shown


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    on = [point for point, best in zip(points, front(points), strict=True) if best]
    off = [point for point, best in zip(points, front(points), strict=True) if not best]
    assert not any(beats(point, other) for point in points for other in on)
    assert all(any(beats(point, other) for point in on) for other in off)
    assert not set(on) & set(off)


def test_runs_that_differ_are_told_apart() -> None:
    first, second = synthetic_results.result(0, FEW, n=80, layers=1), synthetic_results.result(1, FEW[:3], n=60, layers=1)
    assert Runs.of([first, copy.deepcopy(first)], ["a", "b"]).warnings() == []
    second["model"] = "other"
    second["origin"]["versions"]["torch"] = "1.0"
    second["origin"]["cpu"]["threads"] = 99
    second["outcomes"][0]["perplexity"]["context"] = 64
    said = Runs.of([first, second], ["a", "b"]).warnings()
    expected = ("B: other", "text for perplexity", "A: torch 2.13.0+cpu; B: torch 1.0", "99 threads", "A: 80; B: 60); 60 are")
    for sentence, part in zip(said, expected, strict=True):
        assert part in sentence
    shown = Elements(rendered(first, second)).text
    assert all(sentence in shown for sentence in said)

    changes = list(Runs.of([first, second], ["a", "b"]).changes())
    assert [found.recipe for found in changes] == list(FEW[:3])
    for found, before, after in zip(changes, first["outcomes"], second["outcomes"], strict=False):
        right = [[s["right"] for s in o["tasks"]["mmlu"]["samples"][:60]] for o in (before, after)]
        assert found.paired == paired_difference(*right)


def test_a_recipe_in_doubt_is_not_recommended() -> None:
    result = synthetic_results.result(n=200)
    four, three = (next(o for o in result["outcomes"] if o["recipe"] == name) for name in ("int4", "int3"))
    doubt = {"difference": -0.04, "low": -0.083, "high": -0.004, "gained": 3, "lost": 11, "mcnemar": 0.057, "holm": 0.52}
    for outcome in (four, three):
        outcome["tasks"]["mmlu"]["difference"] |= doubt
    lead = " ".join(wording.lead(Runs.of([result], ["a.json"])))
    assert lead.startswith("int4_awq (4.20 bits) is the smallest of 11 recipes that the questions cannot tell from float")
    assert "where each recipe is looked at alone: int4, int4_sym, int3." in lead
    assert "Losses beyond chance: int2." in lead


def test_what_was_not_measured_is_said() -> None:
    shown = Elements(rendered(bare())).text
    assert shown.count("Not measured:") == 6
    assert "Nothing was measured against the float model" in shown


def test_the_page_does_not_tell_where_the_model_lay() -> None:
    for model, shown in (("/srv/some one/Qwen3-8B/", "Qwen3-8B"), ("C:\\models\\tiny", "tiny"), ("org/name", "org/name")):
        text = rendered(bare() | {"model": model})
        assert f"<h1><bdi>{shown}</bdi></h1>" in text
        assert "srv" not in text


@given(st.floats(allow_nan=True, allow_infinity=True) | st.none())
def test_numbers_are_readable(value: float | None) -> None:
    for text in (
        wording.number(value),
        wording.points(value),
        wording.probability(None if value is None else min(abs(value), 1.0)),
    ):
        assert 0 < len(text) < 330
        assert "nan" not in text
        assert "inf" not in text.replace("infinite", "").replace("finite", "")


@pytest.mark.parametrize(
    ("kl", "low", "high", "words"),
    [
        (0.4, -0.02, 0.01, "predictions can: KL above 0.1 nats a token is a loss"),
        (0.01, -0.02, 0.01, "cannot tell from float (a loss of up to 2.0 points is possible)"),
        (None, -0.09, 0.09, "Too few questions to compare recipes: an interval spans 18.0 points."),
        (None, 0.0, 0.01, "cannot tell from float: "),
    ],
)
def test_what_cannot_be_told_is_no_absence_of_loss(kl: float | None, low: float, high: float, words: str) -> None:
    from types import SimpleNamespace

    difference = {
        "difference": (low + high) / 2,
        "low": low,
        "high": high,
        "mcnemar": 0.4,
        "n": 100,
        "questions_for_one_point": 9,
    }
    entry = SimpleNamespace(
        recipe="int3", bits=3.1, run=0, letter="", is_float=False, outcome={},
        difference=lambda task: difference, part=lambda name: {} if kl is None else {"kl": kl},
    )  # fmt: skip
    runs = SimpleNamespace(results=[{}], entries=[entry], tasks=["mmlu"])
    said = " ".join(wording.lead(runs))
    assert words in said
    assert "no loss" not in said
