"""Tests, in folders as the packages that they are of; ``support`` is what they share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
