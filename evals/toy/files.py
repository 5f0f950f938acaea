"""Writing a file so that a reader sees the old text or the new one, never a part."""

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, through a temporary name beside it; makes the folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8", newline="\n")
    beside.replace(path)
