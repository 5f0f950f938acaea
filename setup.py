"""Builds what this machine can: always the Python packages, the CPU library with a C++ compiler, the CUDA one with nvcc.

``pip install .``, or ``-e .``, with or without ``--no-build-isolation``: the libraries are built with the headers of the
torch that is installed, and where there is none ``build_backend/lowbit_build.py`` asks for one.
``LOWBIT_CUDA=1`` builds the CUDA library where torch is a build without CUDA too, ``LOWBIT_CUDA=0`` leaves it out; by
default it is built where both nvcc and a torch with CUDA are found. A library that cannot be built is left out, with
the reason in the log (``pip install -v``), and the package runs without it; with ``LOWBIT_CUDA=1`` the CUDA one must.

The libraries go through torch's stable ABI and never see Python, so one wheel serves every Python and every torch from
2.11 on.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_platform
from typing import NamedTuple

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Without build isolation nobody but this file looks at the version, and a new environment may hold one from years ago.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(f"setuptools 77 or newer is needed, got {setuptools.__version__}: pip install --upgrade setuptools")

from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).absolute().parent
sys.path.insert(0, str(ROOT / "build_backend"))  # where setup.py is run by itself; a front end has put it there

from lowbit_build import find_ninja, find_torch, version_of  # noqa: E402

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-maybe-uninitialized", STABLE_ABI]
if sys.platform != "darwin":
    CXX_FLAGS.append("-ffunction-sections")  # for link_flags
# Flags of each instruction set, which is a namespace in csrc/cpu; the processor chooses when the library runs.
INSTRUCTION_SETS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    # GCC takes its own intrinsics of AVX-512 for uninitialized.
    avx512 = [*avx2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-Wno-uninitialized"]
    INSTRUCTION_SETS |= {
        "avx2": avx2,
        "avx512": avx512,
        "avx512vnni": [*avx512, "-mavx512vbmi", "-mavx512vnni"],
        "avx512bf16": [*avx512, "-mavx512bf16"],
    }
# SASS for sm_80 also runs on 8.6 and 8.9; newer generations than 9.0 compile the PTX when they load it.
CUDA_FLAGS = [
    "-O3", "-std=c++17", "--cudart=static", "-DUSE_CUDA", "-Xcompiler=-fPIC,-fvisibility=hidden", STABLE_ABI,
    "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90a,code=sm_90a",
]  # fmt: skip

# Folders of packages that live outside lowbit/.
FOLDERS = {"lowbit.evals": "evals", "lowbit.recipes": "recipes"}
# Models, texts and figures that the code runs without: the repository and the sdist have them, a wheel has not.
NOT_IN_A_WHEEL = ("evals/results", "evals/toy/model", "evals/toy/data", "evals/toy/training.jsonl")


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
    """Every file of a package that is no code, of those that a wheel holds: tables, templates, recipes."""
    left_out = [ROOT / path for path in NOT_IN_A_WHEEL]
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
            and not any(path == other or other in path.parents for other in left_out)
        ]
        if files:
            data[name] = files
    return data


# ---- what a package index shows ------------------------------------------------------------------------------------


def repository() -> str | None:
    """The web address of the repository: that of git's remote ``origin``, in an sdist that of its own; None where neither is."""
    config, info = ROOT / ".git" / "config", ROOT / "PKG-INFO"
    if config.is_file():
        remote = re.compile(r'^\[remote "origin"\][^\[]*?\burl = (\S+)', re.MULTILINE).search(config.read_text(encoding="utf-8"))
        web = re.compile(r"(?:https://|ssh://git@|git@)(?:[^@/]*@)?([\w.-]+)[:/](.+?)(?:\.git)?/?")
        address = web.fullmatch(remote[1]) if remote else None
        return None if address is None else f"https://{address[1]}/{address[2]}"
    if not info.is_file():
        return None
    found = re.search(r"^Project-URL: Repository, (\S+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else found[1]


def project_urls() -> dict[str, str]:
    """Links of the package index's page."""
    address = repository()
    if address is None:
        return {}
    pages = {"Documentation": "blob/{}/docs/index.md", "Changelog": "blob/{}/CHANGELOG.md", "Issues": "issues"}
    return {"Repository": address, **{name: f"{address}/{page.format(release())}" for name, page in pages.items()}}


def release() -> str:
    """The tag of this version."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml names no version")
    return f"v{found[1]}"


def readme() -> str:
    """README.md, whose links lead to the repository: a package index has no docs/ beside it."""
    text, address = (ROOT / "README.md").read_text(encoding="utf-8"), repository()
    if address is None:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({address}/{kind}/{release()}/{link[3]})"

    return re.sub(r"(!?)\[([^\]\n]*)\]\((?!https?:|#)([^)\s]+)\)", absolute, text)


# ---- compiling -----------------------------------------------------------------------------------------------------


def torch_folder() -> Path:
    torch = find_torch()
    if torch is None:
        raise CompileError("no torch 2.11 or newer is there to build with: pip install torch, then this again")
    return torch


def torch_has_cuda() -> bool:
    torch = find_torch()
    return torch is not None and version_of(torch, "cuda") is not None


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
    # Instances of one template lie together, which a wheel's compression notices; nothing is loaded by a name that is stripped.
    return ["-shared", "-Wl,--gc-sections", "-Wl,--sort-section=name", "-Wl,-s", "-Wl,--no-as-needed", *libraries]


class Step(NamedTuple):
    """A file, what it is made from, and the command that makes it, which runs in ROOT."""

    out: str
    inputs: list[str]
    command: list[str]


def shortened(path: Path) -> str:
    """``path`` from ROOT, where it lies there: objects stay good in a tree that is moved or copied."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def compiled(source: Path, out: Path, command: list[str]) -> Step:
    cache = shutil.which("ccache")
    made, file = shortened(out), shortened(source)
    line = [*command, "-MD", "-MF", f"{made}.d", "-c", file, "-o", made]
    return Step(made, [file], line if cache is None else [cache, *line])


def sets_of(source: Path) -> list[str]:
    """The instruction sets that a file of csrc/cpu is compiled for: that of its namespace; those that its line ``// Instruction
    sets:`` names, or the three general ones, where it is in ``LOWBIT_SET``; none where it binds operators."""
    text = source.read_text(encoding="utf-8")
    namespace = re.search(r"^namespace lowbit::cpu::(\w+) \{", text, re.MULTILINE)
    if namespace is None:
        return []
    if namespace[1] != "LOWBIT_SET":
        return [namespace[1]]
    named = re.search(r"^// Instruction sets: ([\w ]+)$", text, re.MULTILINE)
    return named[1].split() if named else ["portable", "avx2", "avx512"]


def widths_of(source: Path) -> list[str]:
    """The bits of codes that its line ``// Widths:`` names: a file whose kernels take long is compiled for each apart."""
    named = re.search(r"^// Widths: ([\d ]+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    return named[1].split() if named else []


def cpu_commands(out: Path, temp: Path) -> list[Step]:
    """The objects first and the library last."""
    torch, cxx = torch_folder(), compiler()
    steps = []
    for source in sorted((ROOT / "csrc" / "cpu").rglob("*.cpp")):
        if not (sets := sets_of(source)):
            command = [cxx, *CXX_FLAGS, f"-isystem{torch / 'include'}"]
            steps.append(compiled(source, temp / f"{source.stem}.o", command))
        for name in sets:
            if name in INSTRUCTION_SETS:  # else of another processor
                command = [cxx, *CXX_FLAGS, *INSTRUCTION_SETS[name], f"-DLOWBIT_SET={name}"]
                for bits in widths_of(source) or [""]:
                    width = [f"-DLOWBIT_BITS={bits}"] if bits else []
                    steps.append(compiled(source, temp / f"{source.stem}.{name}{bits and '.'}{bits}.o", [*command, *width]))
    objects = [step.out for step in steps]
    return [*steps, Step(shortened(out), objects, [cxx, *objects, *link_flags(torch), "-o", shortened(out)])]


def cuda_commands(out: Path, temp: Path) -> list[Step]:
    """The objects first and the library last."""
    torch, compile_with = torch_folder(), nvcc()
    if compile_with is None:
        raise CompileError("nvcc not found on PATH, in $CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit")
    command = [compile_with, *CUDA_FLAGS, f"-isystem={torch / 'include'}"]
    steps = [compiled(source, temp / f"{source.stem}.o", command) for source in sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))]
    objects = [step.out for step in steps]
    link = [f"-L{torch / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-o", shortened(out)]
    return [*steps, Step(shortened(out), objects, [compile_with, "--shared", "--cudart=static", *objects, *link])]


def carry_out(steps: list[Step], temp: Path) -> None:
    """Run the steps: through ninja, which runs them side by side and only where something changed, or one by one."""
    ninja = find_ninja()
    if ninja is None:
        for step in steps:
            _run(step.command)
        return

    def escaped(text: str) -> str:
        return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    # Compilers say which headers, torch's and their own too, a file has included.
    lines = [f"builddir = {escaped(shortened(temp))}", "rule link", "  command = $command"]
    lines += ["rule compile", "  command = $command", "  deps = gcc", "  depfile = $out.d"]
    for step, rule in zip(steps, [*["compile"] * (len(steps) - 1), "link"], strict=True):
        lines += [f"build {escaped(step.out)}: {rule} {' '.join(map(escaped, step.inputs))}"]
        lines += [f"  command = {shlex.join(step.command).replace('$', '$$')}"]
    (temp / "build.ninja").write_text("\n".join([*lines, ""]))
    _run([ninja, "-f", shortened(temp / "build.ninja"), "-v"])


def _run(command: list[str]) -> None:
    print(*command, flush=True)
    try:
        subprocess.run(command, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"{command[0]} failed: {error}") from error


# ---- setuptools ----------------------------------------------------------------------------------------------------


def extensions() -> list[Extension]:
    cuda = os.environ.get("LOWBIT_CUDA", "")
    if cuda not in ("", "0", "1"):
        raise SystemExit(f"LOWBIT_CUDA must be 0 (leave the CUDA library out) or 1 (build it), got {cuda!r}")
    if sys.platform == "win32":
        return []
    kinds = {"cpu": ("_C", "*.cpp", True), "cuda": ("_C_cuda", "*.cu", cuda != "1")}
    if cuda == "0" or (cuda == "" and not (nvcc() and torch_has_cuda())):
        del kinds["cuda"]
    return [
        Extension(
            f"lowbit_kernels.{name}",
            [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc" / kind).rglob(pattern))],
            optional=optional,
        )
        for kind, (name, pattern, optional) in kinds.items()
    ]


class BuildLibraries(build_ext):
    """Shared libraries that torch loads; Python imports none of them."""

    def finalize_options(self) -> None:
        # One folder for every way of building, so that the next build compiles what changed.
        self.build_temp = self.build_temp or str(ROOT / "build" / f"temp.{get_platform()}")
        super().finalize_options()

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
        library = temp / out.name
        steps = make(library, temp)
        out.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir(parents=True, exist_ok=True)
        carry_out(steps, temp)
        new = out.with_suffix(".new")
        shutil.copyfile(library, new)
        os.replace(new, out)  # a process that has loaded the old one keeps it


class TaggedWheel(bdist_wheel):
    """A wheel for every Python: of this platform with a library in it, of any without."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(self.get_finalized_command("build_ext").get_ext_fullpath(e.name)).exists() for e in extensions())
        return ("py3", "none", super().get_tag()[2] if built else "any")


if __name__ == "__main__":
    setup(
        long_description=readme(),
        long_description_content_type="text/markdown",
        project_urls=project_urls(),
        packages=packages(),
        package_dir=package_dirs(),
        package_data=package_data(),
        include_package_data=False,
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": TaggedWheel},
    )
