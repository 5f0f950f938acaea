"""Texts for perplexity: files, and WikiText-2 from the hub."""

from __future__ import annotations

from pathlib import Path

from .tasks import MissingDataError, offline_if_unreachable, quiet_harness

__all__ = ["WIKITEXT", "read_text"]

WIKITEXT = "wikitext"
_HOME = "Salesforce/wikitext"


def read_text(source: str | Path) -> str:
    """The UTF-8 file ``source``; for ``"wikitext"``, where no file is called so, WikiText-2's test rows with blank lines between.

    These are the raw rows, joined as GPTQ and most later papers do. Raises ``ValueError`` for a file that cannot be read and
    :class:`~lowbit.evals.tasks.MissingDataError` for rows that cannot be had, naming either.
    """
    if str(source) == WIKITEXT and not Path(source).exists():
        return "\n\n".join(_rows())
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the text {source} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _rows() -> list[str]:
    try:
        import datasets
    except ImportError:
        raise ImportError(f"the text {WIKITEXT} needs datasets: pip install 'lowbit[eval]'") from None
    try:
        with offline_if_unreachable(), quiet_harness():
            return list(datasets.load_dataset(_HOME, "wikitext-2-raw-v1", split="test")["text"])
    except (OSError, ValueError) as error:
        raise MissingDataError(
            f"the text {WIKITEXT} ({_HOME} on the hub) cannot be had: {' '.join(str(error).split())[:160]}; fetch it where there "
            f"is a network, or give a file with --text FILE"
        ) from None
