"""Builds what this machine can: always the Python packages, the CPU library with a C++ compiler, the CUDA one with nvcc.

``pip install --no-build-isolation .`` (or ``-e .``), so that the libraries are built against the torch that is there.
``LOWBIT_CUDA=1`` builds the CUDA library where torch is a build without CUDA too, ``LOWBIT_CUDA=0`` leaves it out; by
default it is built where both nvcc and a torch with CUDA are found. A library that cannot be built is left out, with
the reason in the log (``pip install -v``), and the package runs without it; with ``LOWBIT_CUDA=1`` the CUDA one must.

The libraries go through torch's stable ABI and never see Python, so one wheel serves every Python and every torch from
2.11 on.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Without build isolation nobody but this file looks at the version, and a new environment may hold one from years ago.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(f"setuptools 77 or newer is needed, got {setuptools.__version__}: pip install --upgrade setuptools")

from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-maybe-uninitialized", STABLE_ABI]
# Flags of each copy of csrc/cpu (linear, panels, ends, quantize, decoder); the processor chooses when the library runs.
INSTRUCTION_SETS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    INSTRUCTION_SETS["avx512"] = [*INSTRUCTION_SETS["avx2"], "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# SASS for sm_80 also runs on 8.6 and 8.9; newer generations than 9.0 compile the PTX when they load it.
CUDA_FLAGS = [
    "-O3", "-std=c++17", "--cudart=static", "-DUSE_CUDA", "-Xcompiler=-fPIC,-fvisibility=hidden", STABLE_ABI,
    "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90a,code=sm_90a",
]  # fmt: skip

# Folders of packages that live outside lowbit/.
FOLDERS = {"lowbit.evals": "evals", "lowbit.recipes": "recipes"}


# ---- packages ------------------------------------------------------------------------------------------------------


def packages() -> list[str]:
    """Every package: none but lowbit and lowbit_kernels at the top."""
    found = find_packages(str(ROOT), include=["lowbit", "lowbit.*", "lowbit_kernels", "lowbit_kernels.*"])
    for name, folder in FOLDERS.items():
        if (ROOT / folder).is_dir():
            found += [name, *(f"{name}.{inner}" for inner in find_packages(str(ROOT / folder)))]
    return found


def package_dirs() -> dict[str, str]:
    """Where the packages lie that do not lie where their name says."""
    return {
        name: name.replace(prefix, folder).replace(".", "/")
        for prefix, folder in FOLDERS.items()
        for name in packages()
        if name == prefix or name.startswith(prefix + ".")
    }


def package_data() -> dict[str, list[str]]:
    """Every file of a package that is no code: models, texts, tables, recipes."""
    known = packages()
    data = {}
    for name in known:
        folder = ROOT / package_dirs().get(name, name.replace(".", "/"))
        inner = [ROOT / package_dirs().get(p, p.replace(".", "/")) for p in known if p.startswith(name + ".")]
        files = [
            path.relative_to(folder).as_posix()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
            and path.suffix not in (".py", ".pyc", ".so")
            and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
            and not any(other in path.parents for other in inner)
        ]
        if files:
            data[name] = files
    return data


# ---- compiling -----------------------------------------------------------------------------------------------------


def torch_folder() -> Path:
    try:
        import torch
    except Exception as error:
        raise CompileError(f"torch cannot be imported ({error}): install torch, then this with --no-build-isolation") from error
    return Path(torch.__file__).parent


def torch_has_cuda() -> bool:
    try:
        import torch
    except Exception:
        return False
    return torch.version.cuda is not None


def compiler() -> str:
    name = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if name is None:
        raise CompileError("no C++ compiler found (c++, g++, clang++ or $CXX): install one, for example g++")
    return name


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [str(Path(home, "bin", "nvcc"))] if home else []
    return next((found for c in (*candidates, "nvcc", "/usr/local/cuda/bin/nvcc") if (found := shutil.which(c))), None)


def link_flags(torch: Path) -> list[str]:
    libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    if sys.platform == "darwin":
        return ["-dynamiclib", "-undefined", "dynamic_lookup", *libraries]
    return ["-shared", "-Wl,--no-as-needed", *libraries]


def cpu_commands(out: Path, temp: Path) -> list[tuple[Path, list[str]]]:
    """(file, the command that makes it), the objects first and the library last."""
    torch, cxx = torch_folder(), compiler()
    include = f"-isystem{torch / 'include'}"
    folder = ROOT / "csrc" / "cpu"
    objects = {temp / f"{file.stem}.o": [include, str(file)] for file in sorted(folder.glob("*_bindings.cpp"))}
    for name, flags in INSTRUCTION_SETS.items():
        for source in ("linear", "panels", "ends", "quantize", "decoder"):
            quiet = ["-Wno-uninitialized"] if source == "decoder" else []  # of GCC's own intrinsics
            objects[temp / f"{source}_{name}.o"] = [*flags, *quiet, f"-DLOWBIT_SET={name}", str(folder / f"{source}.cpp")]
    if "avx512" in INSTRUCTION_SETS:
        for name, source in itertools.product(("avx2", "avx512"), ("order_of_x", "units_of_x")):
            objects[temp / f"{source}_{name}.o"] = [
                *INSTRUCTION_SETS[name],
                f"-DLOWBIT_SET={name}",
                str(folder / f"{source}.cpp"),
            ]
        for source in ("digits_avx2", "floats_avx2", "interleaved_avx2"):
            objects[temp / f"{source}.o"] = [*INSTRUCTION_SETS["avx2"], str(folder / f"{source}.cpp")]
        flags = [*INSTRUCTION_SETS["avx512"], "-mavx512vbmi", "-mavx512vnni", "-Wno-uninitialized"]  # of GCC's own intrinsics
        for source in ("digits", "floats", "interleaved"):
            objects[temp / f"{source}.o"] = [*flags, str(folder / f"{source}.cpp")]
        flags = [*INSTRUCTION_SETS["avx512"], "-mavx512bf16", "-Wno-uninitialized"]
        objects[temp / "dots.o"] = [*flags, str(folder / "dots.cpp")]
        objects[temp / "panels_avx512bf16.o"] = [*flags, "-DLOWBIT_SET=avx512bf16", str(folder / "panels.cpp")]
    commands = [(path, [cxx, *CXX_FLAGS, *flags, "-c", "-o", str(path)]) for path, flags in objects.items()]
    return [*commands, (out, [cxx, *map(str, objects), *link_flags(torch), "-o", str(out)])]


def cuda_commands(out: Path, temp: Path) -> list[tuple[Path, list[str]]]:
    torch, compile_with = torch_folder(), nvcc()
    if compile_with is None:
        raise CompileError("nvcc not found on PATH, in $CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit")
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    flags = [*CUDA_FLAGS, f"-isystem={torch / 'include'}"]
    commands = [(temp / f"{s.stem}.o", [compile_with, *flags, "-c", str(s), "-o", str(temp / f"{s.stem}.o")]) for s in sources]
    link = [f"-L{torch / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    objects = [str(path) for path, _ in commands]
    return [*commands, (out, [compile_with, "--shared", "--cudart=static", *objects, *link, "-o", str(out)])]


def carry_out(commands: list[tuple[Path, list[str]]], temp: Path, sources: list[str]) -> None:
    """Run the commands: through ninja, which runs them side by side and only where something changed, or one by one."""
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja is None:
        for _, command in commands:
            _run(command)
        return

    def escaped(text: object) -> str:
        return str(text).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = ["rule run", "  command = $command", ""]
    *objects, (library, link) = commands
    for path, command in objects:
        lines += [f"build {escaped(path)}: run {' '.join(map(escaped, sources))}", f"  command = {_quoted(command)}"]
    lines += [f"build {escaped(library)}: run {' '.join(escaped(p) for p, _ in objects)}", f"  command = {_quoted(link)}", ""]
    (temp / "build.ninja").write_text("\n".join(lines))
    _run([ninja, "-C", str(temp), "-v"])


def _quoted(command: list[str]) -> str:
    import shlex

    return shlex.join(command).replace("$", "$$")


def _run(command: list[str]) -> None:
    print(*command, flush=True)
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"{command[0]} failed: {error}") from error


# ---- setuptools ----------------------------------------------------------------------------------------------------


def extensions() -> list[Extension]:
    cuda = os.environ.get("LOWBIT_CUDA", "")
    if cuda not in ("", "0", "1"):
        raise SystemExit(f"LOWBIT_CUDA must be 0 (leave the CUDA library out) or 1 (build it), got {cuda!r}")
    if sys.platform == "win32":
        return []
    # All of csrc, so that an sdist made without nvcc holds the CUDA sources too.
    everything = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.*")) if path.suffix != ".pyc"]
    kinds = {"cpu": ("_C", "*.cpp", True), "cuda": ("_C_cuda", "*.cu", cuda != "1")}
    if cuda == "0" or (cuda == "" and not (nvcc() and torch_has_cuda())):
        del kinds["cuda"]
    return [
        Extension(
            f"lowbit_kernels.{name}",
            [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc" / kind).glob(pattern))],
            depends=everything,
            optional=optional,
        )
        for kind, (name, pattern, optional) in kinds.items()
    ]


class BuildLibraries(build_ext):
    """Shared libraries that torch loads; Python imports none of them."""

    def run(self) -> None:
        # What an earlier build left here must not travel in a wheel for which it was not asked, or not built.
        for stale in Path(self.build_lib, "lowbit_kernels").glob("*.so"):
            stale.unlink()
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).absolute()
        temp = Path(self.build_temp, ext.name).absolute()
        make = cuda_commands if ext.name.endswith("_cuda") else cpu_commands
        commands = make(out, temp)
        out.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir(parents=True, exist_ok=True)
        headers = [path for path in ext.depends if path.endswith((".h", ".cuh"))]
        carry_out(commands, temp, [str((ROOT / path).absolute()) for path in [*ext.sources, *headers]])


class TaggedWheel(bdist_wheel):
    """A wheel for every Python: of this platform with a library in it, of any without."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(self.get_finalized_command("build_ext").get_ext_fullpath(e.name)).exists() for e in extensions())
        return ("py3", "none", super().get_tag()[2] if built else "any")


if __name__ == "__main__":
    setup(
        packages=packages(),
        package_dir=package_dirs(),
        package_data=package_data(),
        include_package_data=False,
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": TaggedWheel},
    )
