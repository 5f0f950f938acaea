"""Pages that are written when mkdocs builds, from what they are about: the command line, the design, the changelog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {"design.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, "command-line.md", content=command_line()))
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``::: lowbit.NAME`` of a public name as the module that defines it, where mkdocstrings looks for it."""
    if not page.file.src_uri.startswith("reference/"):
        return markdown
    return re.sub(r"^::: lowbit\.(\w+)$", lambda match: _block(match[1]), markdown, flags=re.MULTILINE)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Roles of docstrings as what they name: ``:class:`~lowbit.Plan``` is Plan."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    shown = lambda match: f"<code>{match[2].rpartition('.')[2] if match[1] else match[2]}</code>"  # noqa: E731
    return re.sub(r":(?:class|func|meth|mod|data|attr):\s*<code>(~?)([\w.]+)</code>", shown, html)


def _block(name: str) -> str:
    import lowbit

    value = getattr(lowbit, name)
    value = getattr(value, "__wrapped__", value)
    if value.__name__ != name:  # another name of the same
        return f"## `{name}`\n\nAnother name of `{value.__name__}`."
    return f"::: {value.__module__}.{value.__qualname__}\n    options:\n      heading: lowbit.{name}\n      toc_label: {name}"


def command_line() -> str:
    """Every command with its arguments and options, as its ``--help`` has them."""
    import click
    import typer

    from lowbit.command import app

    codes = "Exit codes: 0, 1 for work that failed, 2 for a mistake in the command line, 130 for an interrupt."
    lines = ["# The command line", "", codes]

    def add(command: Any, name: str) -> None:
        lines.extend(["", f"## `{name}`", "", _plain(command.help or "")])
        inner = getattr(command, "commands", None)
        if inner:
            for key, one in inner.items():
                add(one, f"{name} {key}")
            return
        context = click.Context(command, info_name=name)
        rows = []
        for parameter in command.get_params(context):
            if getattr(parameter, "hidden", False):
                continue
            names = ", ".join(f"`{opt}`" for opt in parameter.opts) or f"`{parameter.name}`"
            default = parameter.default
            shown = "" if default in (None, False, "", ()) or callable(default) else f" Default: `{default}`."
            rows.append(f"| {names} | {_plain(getattr(parameter, 'help', '') or '')}{shown} |")
        if rows:
            lines.extend(["", "| | |", "| --- | --- |", *rows])

    root = typer.main.get_command(app)
    for key, command in root.commands.items():
        add(command, f"lowbit {key}")
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
