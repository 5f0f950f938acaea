"""Tests of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: ``python -m tests.support.sanitized``.

Builds the CPU library with both into a folder of its own, and runs pytest with it in place of the installed one. Any report
ends the run with an error. Arguments go to pytest. Python's own leaks are not looked for.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import ROOT

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
FILES = ["tests/lowbit_kernels/cpu", "tests/lowbit_kernels/test_kernels.py"]
TESTS = [*FILES, "--slow", "-m", "not gpu", "-k", "cpu_"]


def build(library: Path, temp: Path) -> str:
    """The library at ``library``; returns the compiler."""
    sys.path.insert(0, str(ROOT))
    setup = importlib.import_module("setup")  # its commands alone: nothing is set up on import

    *objects, link = setup.cpu_commands(library, temp)

    def compile_one(step: Any) -> None:
        print("compiling", step.out, flush=True)
        subprocess.run([*("-O1" if part == "-O3" else part for part in step.command), *FLAGS], check=True, cwd=ROOT)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The last ones take the longest.
        for done in [pool.submit(compile_one, step) for step in reversed(objects)]:
            done.result()
    subprocess.run([*link.command, *FLAGS], check=True, cwd=ROOT)
    return str(link.command[0])


def tree(folder: Path, library: Path) -> None:
    """Links to all of this project in ``folder``, with ``library`` as its CPU library."""
    kernels = folder / "lowbit_kernels"
    kernels.mkdir(parents=True)
    for path in (*ROOT.iterdir(), *(ROOT / "lowbit_kernels").iterdir()):
        if path.name not in ("lowbit_kernels", "_C.so", ".git"):
            (folder / path.relative_to(ROOT)).symlink_to(path)
    (kernels / "_C.so").symlink_to(library)


def main() -> int:
    with tempfile.TemporaryDirectory() as temp:
        library = Path(temp, "_C.so")
        compiler = build(library, Path(temp))
        runtime = [
            subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
            for name in ("libasan.so", "libubsan.so", "libstdc++.so")
        ]
        tree(Path(temp, "tree"), library)
        environment = {
            **os.environ,
            "LD_PRELOAD": ":".join(runtime),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "2",
            "PYTHONPATH": str(Path(temp, "tree")),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS)]
        return subprocess.run(command, cwd=Path(temp, "tree"), env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
