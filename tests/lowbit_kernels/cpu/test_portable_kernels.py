"""The portable kernels compiled without torch, here and for aarch64 under qemu, against float64 of the same weights."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit import QTensor, Scheme
from tests import ROOT

CSRC = ROOT / "csrc" / "cpu"
UNITS = [CSRC / "kernels" / "linear.cpp", CSRC / "kernels" / "dequantize.cpp"]
KINDS = ("nibbles", "signed_bytes", "unsigned_bytes", "integers", "truncated_half", "halves", "table")  # Codes of linear.h
CASES = [  # scheme, the kind of codes that it takes
    *((f"uint{bits}:g32:zint:fp32", kind) for bits, kind in ((2, "integers"), (3, "integers"), (5, "integers"), (6, "integers"))),
    *((f"uint{bits}:g64:zint:fp32", kind) for bits, kind in ((4, "nibbles"), (7, "integers"), (8, "unsigned_bytes"))),
    *((f"int{bits}:g32:fp32", kind) for bits, kind in ((3, "integers"), (4, "nibbles"), (8, "signed_bytes"))),
    *((f"{name}:g32:fp32", "table") for name in ("fp8_e4m3fn", "fp6_e2m3", "fp5_e2m2", "nf4", "ternary")),
    ("nf4:g32:fp32", "nibbles"),
]


def compilers() -> Iterator[object]:
    for name, compiler, runner in (
        ("here", "c++", ()),
        ("aarch64", "aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
    ):
        missing = [tool for tool in (compiler, *runner[:1]) if shutil.which(tool) is None]
        skip = pytest.mark.skipif(bool(missing), reason=f"there is no {' and no '.join(missing)}")
        yield pytest.param((compiler, runner), id=name, marks=skip)


@pytest.fixture(scope="module", params=compilers())
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the kernels of one processor."""
    compiler, runner = request.param
    out = tmp_path_factory.mktemp("portable") / "kernels"
    sources = [*UNITS, ROOT / "tests" / "support" / "portable_kernels.cpp"]
    command = [compiler, "-O2", "-std=c++17", "-Wall", "-DLOWBIT_SET=portable", f"-I{CSRC}", *map(str, sources), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return [*runner, str(out)]


def run(program: list[str], q: QTensor, kind: str, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    (n, k), m, scheme = q.shape, len(x), q.scheme
    values = np.array([float(v) for v in scheme.fmt.values], np.float32)
    parts = [None if part is None else part.contiguous().numpy() for part in (q.packed, q.scale, q.zero_point)]
    signed = scheme.format.startswith("int")
    head = struct.pack(
        "<9i", KINDS.index(kind), scheme.bits, signed, m, n, k, scheme.group(k), parts[2] is not None, q.packed.shape[1]
    )
    sent = b"".join([head, values.tobytes(), *(part.tobytes() for part in parts if part is not None), x.numpy().tobytes()])
    found = np.frombuffer(subprocess.run(program, input=sent, capture_output=True, check=True).stdout, np.float32)
    return found[: m * n].reshape(m, n), found[m * n :].reshape(n, k)


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 64), (3, 8, 130), (8, 3, 257)])
def test_products_and_weights(program: list[str], name: str, kind: str, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m + k)
    q = QTensor.quantize(torch.randn(n, k, generator=generator), Scheme.parse(name))
    x = torch.randn(m, k, generator=generator)
    y, weight = run(program, q.canonical(), kind, x)
    exact = q.dequantize(torch.float64).numpy()
    # One rounding of (code - zero) * scale, in which the difference is exact.
    np.testing.assert_allclose(weight, exact, rtol=2**-23, atol=0)
    # K products and K additions in float32, zero points beside them: each sum errs by half a unit of what came before it.
    reach = np.abs(x.double().numpy()) @ np.abs(exact).T
    offset = (
        0
        if q.zero_point is None
        else np.abs(x.double().numpy()).sum(1, keepdims=True) * float(q.scale.abs().max()) * 2**q.scheme.bits
    )
    assert (np.abs(y - x.double().numpy() @ exact.T) <= (2 * k + 8) * 2**-24 * (reach + 2 * offset)).all()


def test_every_portable_unit_compiles_for_aarch64(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("there is no aarch64-linux-gnu-g++")
    units = [
        path
        for path in CSRC.rglob("*.cpp")
        if "namespace lowbit::cpu::LOWBIT_SET" in path.read_text() and "// Instruction sets:" not in path.read_text()
    ]
    assert len(units) >= 4
    for unit in units:
        command = [
            compiler,
            "-O1",
            "-std=c++17",
            "-fPIC",
            "-Wall",
            "-DLOWBIT_SET=portable",
            "-c",
            str(unit),
            "-o",
            str(tmp_path / "unit.o"),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
