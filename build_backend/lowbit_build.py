"""The build backend: setuptools' own, which asks for torch and ninja only where they are not there already.

The libraries need torch's headers. pip builds in an environment of its own, and with torch among the requirements of every
build it would download another one, with CUDA's libraries, to build beside the torch that is installed. That environment hides
what is installed from imports only: headers are files, and a Python without pip's variables says where they are. Other front
ends (uv, build) make a whole environment, which gets a torch of its own. Either serves: the libraries go through torch's stable
ABI.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

__all__ = ["find_ninja", "find_torch", "version_of"]

OLDEST_TORCH = (2, 11)
_ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")  # what pip sets for a build, in place of what the user had set
_WHERE = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s and s.origin else '')"


def find_torch() -> Path | None:
    """The folder of a torch to build with: that of this environment, else of the one that pip builds for."""
    return next((folder for find in (_visible_torch, _hidden_torch) if (folder := find()) and _is_new(folder)), None)


def _visible_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _hidden_torch() -> Path | None:
    env = {name: value for name, value in os.environ.items() if name not in _ISOLATION}
    # Away from this folder, which a Python with -c looks into first.
    done = subprocess.run([sys.executable, "-c", _WHERE], env=env, cwd=sys.prefix, capture_output=True, text=True)
    return Path(done.stdout.strip()).parent if done.returncode == 0 and done.stdout.strip() else None


def version_of(torch: Path, name: str = "__version__") -> str | None:
    """``__version__``, or ``cuda``, of the torch in a folder, which is not imported: what it needs may be out of sight."""
    text = (torch / "version.py").read_text(encoding="utf-8")
    found = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return None if found is None else found[1]


def _is_new(torch: Path) -> bool:
    if not (torch / "version.py").is_file() or not (torch / "include").is_dir():
        return False
    return tuple(map(int, re.findall(r"\d+", version_of(torch) or "0")[:2])) >= OLDEST_TORCH


def find_ninja() -> str | None:
    """The ninja beside this Python, or the one on PATH: always the same, for another version would compile everything again."""
    return shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")


def _requirements() -> list[str]:
    if sys.platform == "win32":  # where no library is built
        return []
    torch = [] if find_torch() is not None else [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]
    return [*torch, *([] if find_ninja() else ["ninja"])]


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_requirements()]


def get_requires_for_build_editable(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_requirements()]
