"""The report: what quantization cost and what it saved, as one page that opens from the disk, and pictures beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import replace_together
from .schema import FORMAT, ReportError, check, check_speeds, is_speeds, read_json

__all__ = ["FORMAT", "ReportError", "read_files", "write_report"]


def write_report(
    results: Sequence[dict[str, Any]],
    folder: str | Path,
    names: Sequence[str] | None = None,
    speeds: Mapping[str, dict[str, Any]] | None = None,
) -> Path:
    """Write ``report.html`` and a PNG of each of its charts into ``folder``, which is made if there is none.

    Args:
        results: evaluations as :data:`FORMAT` has them; several are laid side by side, recipe by recipe.
        names: what the runs are called, such as their files; by default "run A", "run B", ...
        speeds: what ``lowbit bench gemv`` measured, on this machine or another, by the names of their files.

    Returns the page's path. Nothing is replaced before everything is written, so that a full disk leaves what was there.
    Raises :class:`ReportError` for a result that is none, naming the field; ``ImportError`` without matplotlib or jinja2.
    """
    if not results:
        raise ReportError("a report needs at least one result")
    names = [f"run {chr(65 + i % 26)}" for i in range(len(results))] if names is None else list(names)
    if len(names) != len(results):
        raise ReportError(f"there must be a name for each result, got {len(names)} for {len(results)}")
    for name, result in zip(names, results, strict=True):
        check(result, name)
    for name, figures in (speeds or {}).items():
        check_speeds(figures, name)
    try:
        from . import charts, page
    except ImportError as error:
        raise ImportError(f"a report needs matplotlib and jinja2 ({error}): pip install 'lowbit[plot]'") from None
    from .entries import Runs

    runs = Runs.of(results, names, speeds)
    drawn = charts.draw(runs)
    files = {f"{chart.name}.png": chart.png for chart in drawn}
    html = page.render(runs, {chart.name: chart for chart in drawn}).encode("utf-8")
    stale = [f"{name}.png" for name in charts.NAMES if f"{name}.png" not in files]
    replace_together(Path(folder), {**files, "report.html": html}, stale)
    return Path(folder) / "report.html"


def read_files(paths: Sequence[str | Path]) -> tuple[list[dict[str, Any]], list[str], dict[str, dict[str, Any]]]:
    """What :func:`write_report` takes, from files: results of ``lowbit eval``, their names, and speeds of ``lowbit bench gemv``.

    Raises :class:`ReportError` that names the file, and the field where one is wrong.
    """
    found = [(Path(path), read_json(path)) for path in paths]
    for path, content in found:
        (check_speeds if is_speeds(content) else check)(content, str(path))
    results = [(path.name, content) for path, content in found if not is_speeds(content)]
    speeds = {path.name: content for path, content in found if is_speeds(content)}
    return [content for _, content in results], [name for name, _ in results], speeds
