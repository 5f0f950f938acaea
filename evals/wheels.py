"""What a release is made of, and whether it runs: a wheel and an sdist in clean environments of several Pythons.

    python -m lowbit.evals.wheels dist/*.whl dist/*.tar.gz --python python3.11 --python python3.13 --out wheels.json

Where torch's CPU build of that version cannot be had for a Python, what pip would install is resolved, the files are installed
without it, and their code is compiled; the row says so (``"torch": null``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from .results import write_result
from .tables import RESULTS

__all__ = ["contents", "installed", "main"]

TORCH = "2.13.0+cpu"
_ROOT = Path(__file__).resolve().parent.parent
# A product of small random weights in each scheme beside the same product in float64: the largest difference over |x| |W|^T.
_CHECK = """
import json, sys, torch, lowbit
assert "site-packages" in lowbit.__file__, lowbit.__file__
torch.manual_seed(0)
found = {}
for scheme in ("int8", "int4", "int3", "nf4", "fp8", "mxfp4", "nvfp4"):
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    lowbit.quantize_(model, scheme)
    weight, x = model[0].weight.dequantize().double(), torch.randn(3, 256)
    with torch.no_grad(), lowbit.strict(), lowbit.trace_kernels() as trace:
        y = model(x).double()
    error = ((y - x.double() @ weight.T).abs() / (x.double().abs() @ weight.abs().T)).max().item()
    assert error < 1e-4, (scheme, error)
    found[scheme] = error
print(json.dumps({"torch": torch.__version__, "errors": found}))
"""


def contents(path: Path) -> dict[str, Any]:
    """Bytes of a wheel or an sdist, its number of files, and the bytes that each of its folders takes in it, compressed."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            files = [(entry.filename, entry.compress_size) for entry in archive.infolist()]
        folders = Counter[str]()
        for name, size in files:
            folders[name if name.endswith(".so") else PurePosixPath(name).parts[0]] += size
        return {"name": path.name, "bytes": path.stat().st_size, "files": len(files), "compressed": dict(folders)}
    with tarfile.open(path) as archive:
        members = [(member.name.partition("/")[2], member.size) for member in archive.getmembers() if member.isfile()]
    tops = Counter[str]()
    for name, size in members:
        tops[PurePosixPath(name).parts[0] if "/" in name else "."] += size
    return {"name": path.name, "bytes": path.stat().st_size, "files": len(members), "uncompressed": dict(tops)}


def installed(python: str, file: Path) -> dict[str, Any]:
    """``file`` in a clean environment of ``python``: what ``lowbit env`` says, and the errors of its products.

    Raises ``subprocess.CalledProcessError`` for a step that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "environment", "bin", "python")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOWBIT"))}

        def run(*arguments: str) -> str:
            done = subprocess.run([str(inner), *arguments], cwd=folder, env=env, capture_output=True, text=True)
            if done.returncode != 0:
                raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr[-2000:])
            return done.stdout

        subprocess.run([python, "-m", "venv", str(inner.parent.parent)], check=True)
        pip = ("-m", "pip", "install", "-q", "-c", str(_ROOT / "constraints.txt"))
        row: dict[str, Any] = {
            "file": file.name,
            "python": run("-c", "import platform; print(platform.python_version())").strip(),
        }
        run(*pip, "-U", "pip", "setuptools>=77", "ninja")
        try:
            run(*pip, "--only-binary", ":all:", f"torch=={TORCH}")
        except subprocess.CalledProcessError:
            wanted = json.loads(run(*pip, "--dry-run", "--no-build-isolation", "--report", "-", str(file)))["install"]
            resolved = {one["metadata"]["name"]: one["metadata"]["version"] for one in wanted}
            run(*pip, "--no-deps", "--no-build-isolation", str(file))
            place = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
            run("-W", "error", "-m", "compileall", "-q", "-f", f"{place}/lowbit", f"{place}/lowbit_kernels")
            return {**row, "torch": None, "resolved": {name: resolved[name] for name in ("torch", "numpy", "safetensors")}}
        env["LOWBIT_CUDA"] = "0"
        run(*pip, "--no-build-isolation", str(file))
        lines = run("-m", "lowbit", "env").splitlines()
        return {**row, **json.loads(run("-W", "error", "-c", _CHECK)), "env": lines}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Install a release's files in clean environments and try them.")
    parser.add_argument("files", type=Path, nargs="+", help="a wheel, an sdist")
    parser.add_argument("--python", action="append", default=[], help="an interpreter; once for each")
    parser.add_argument("--out", type=Path, default=RESULTS / "wheels.json", help="JSON file to write")
    options = parser.parse_args(arguments)
    files = [file.resolve() for file in options.files]
    rows = []
    for python in options.python:
        for file in files:
            rows.append(installed(python, file))
            print(json.dumps(rows[-1]), flush=True)
    write_result(options.out, {"files": [contents(file) for file in files], "installed": rows})


if __name__ == "__main__":
    main()
