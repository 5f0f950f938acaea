"""The README's picture: bytes against divergence of a pretrained model, from the figures under ``evals/results``.

python -m lowbit.evals.picture docs/images/cost.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .results import replace_file
from .tables import RESULTS

__all__ = ["picture"]

_LEFT = {"int4", "nf4"}  # names that stand left of their points, where others are near


def picture() -> str:
    """SVG, the same bytes for the same figures."""
    import io

    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    result = json.loads((RESULTS / "mmlu_h100.json").read_text(encoding="utf-8"))
    size = {outcome["recipe"]: outcome["file_bytes"] / 1e9 for outcome in result["outcomes"]}
    points = [(o["recipe"], size[o["recipe"]], o["divergence"]["kl"]) for o in result["outcomes"] if o["divergence"]]
    out = io.StringIO()
    with pyplot.rc_context({"svg.hashsalt": "lowbit", "svg.fonttype": "none", "font.size": 11, "font.family": "sans-serif"}):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
        axes.set_yscale("log")
        axes.axvline(size["float"], color="#888888", linestyle=":", linewidth=1)
        axes.annotate("bf16", (size["float"], 0.3), textcoords="offset points", xytext=(-6, 0), ha="right", color="#888888")
        for name, x, y in points:
            axes.plot(x, y, "o", color="#1f6feb")
            left = name in _LEFT
            place = {"textcoords": "offset points", "xytext": (-8 if left else 8, -4), "ha": "right" if left else "left"}
            axes.annotate(name, (x, y), **place)
        axes.set_xlim(0.8, size["float"] + 0.15)
        axes.set_ylim(0.001, 1)
        axes.set_xlabel(f"GB on disk, {result['model']}")
        axes.set_ylabel("KL divergence, nats a token")
        axes.grid(alpha=0.25)
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return out.getvalue()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw bytes against loss, as SVG.")
    parser.add_argument("file", type=Path)
    file = parser.parse_args(arguments).file
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, picture())


if __name__ == "__main__":
    main()
