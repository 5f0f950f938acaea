"""What setup.py builds and packs, how it is installed, and what is said where something is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lowbit
from lowbit import catalog
from lowbit_kernels import build, cpu, cuda, registry
from tests import ROOT


def load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return load_file("lowbit_setup", ROOT / "setup.py")


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine")
def test_a_compiler_brings_the_cpu_library() -> None:
    """A library that failed to build would make the tests of its rows skip: here that is a failure."""
    assert cpu.available() is None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["mixed_gemm_int2_to_int4_bf16", "w8a8_gemm"])
def test_products_of_hopper_stay_in_registers(setup: ModuleType, source: str, tmp_path: Path) -> None:
    """What spills, or waits for each product, or stores y a quarter at a time, is right and slow: only the build tells."""
    said = compiled(setup, source, tmp_path / "kernels.o")
    kernels = spills(said)
    assert len(kernels) > 4
    assert set(kernels.values()) == {0}
    assert "Potential Performance Loss" not in said
    dump = cuobjdump()
    assert dump, "neither CUDA's folder nor Triton's has cuobjdump: install triton"
    code = subprocess.run([dump, "-sass", str(tmp_path / "kernels.o")], capture_output=True, text=True, check=True).stdout
    assert "STG.E.128" in code
    assert not re.search(r"STG\.E desc.*\+0x[0-9a-f]*c\]", code), "sixteen bytes are stored four at a time: see store_sixteen"
    if source.startswith("mixed_gemm"):
        loops = list(loops_of_products(code))
        assert len(loops) > 4
        assert not [loop for loop in loops if "S2UR" in loop], "a loop asks where its shared memory is: let registers hold that"


@pytest.mark.slow
@pytest.mark.parametrize(("source", "usual"), [("split_int8_gemv_int4", "FieldWeights"), ("split_int8_gemv_e2m1", "E2m1Weights")])
def test_one_row_of_x_meets_four_bits_in_registers(setup: ModuleType, source: str, usual: str, tmp_path: Path) -> None:
    """A block's seventeen warps have 96 registers a thread: what does not fit waits for memory in front of the products."""
    kernels = {
        name: spilled for name, spilled in spills(compiled(setup, source, tmp_path / "kernels.o")).items() if usual in name
    }
    assert len(kernels) > 4
    assert set(kernels.values()) == {0}


def compiled(setup: ModuleType, source: str, to: Path) -> str:
    """What ptxas says of a unit's kernels for sm_90a."""
    compile_with = setup.nvcc()
    if compile_with is None:
        pytest.skip("nvcc is not on this machine")
    where = ["-gencode=arch=compute_90a,code=sm_90a", f"-isystem={setup.torch_folder() / 'include'}"]
    flags = [flag for flag in setup.CUDA_FLAGS if "gencode" not in flag]
    file = next((ROOT / "csrc" / "cuda").rglob(f"{source}.cu"))
    command = [compile_with, *flags, *where, "-Xptxas=-v", "-c", str(file), "-o", str(to)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def spills(said: str) -> dict[str, int]:
    """Bytes that each kernel stores and loads for want of registers."""
    found = re.findall(r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return {name: int(stores) + int(loads) for name, stores, loads in found}


def cuobjdump() -> str | None:
    """CUDA's, or the one that Triton brings."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton and triton.origin else Path()
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=str(beside))


def loops_of_products(code: str) -> Iterator[str]:
    """Of each kernel in ``cuobjdump -sass``, the innermost loop with most products of the tensor cores."""
    for kernel in code.split("Function : ")[1:]:
        lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", kernel)]
        jumps = [(at, int(to[1], 16)) for at, what in lines if (to := re.search(r"BRA.* 0x([0-9a-f]+)", what))]
        back = [(to, at) for at, to in jumps if to < at]
        inner = [(a, b) for a, b in back if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in back)]
        loops = ["\n".join(what for at, what in lines if first <= at <= last) for first, last in inner]
        loop = max(loops, key=lambda loop: loop.count("HGMMA"), default="")
        if "HGMMA" in loop:
            yield loop


# ---- what a wheel holds ----------------------------------------------------------------------------------------


def test_no_other_top_level_packages(setup: ModuleType) -> None:
    packages = setup.packages()
    assert {name.partition(".")[0] for name in packages} == {"lowbit", "lowbit_kernels"}
    assert {"lowbit_kernels.triton", "lowbit.algorithms", "lowbit.evals", "lowbit.evals.toy", "lowbit.recipes"} <= set(packages)


def test_every_file_of_a_package_travels(setup: ModuleType) -> None:
    folders = {name: ROOT / setup.package_dirs().get(name, name.replace(".", "/")) for name in setup.packages()}
    packed = {folders[name] / file for name, files in setup.package_data().items() for file in files}
    packed |= {path for folder in folders.values() for path in folder.glob("*.py")}
    for top in ("lowbit", "lowbit_kernels", "evals", "recipes"):
        for path in (ROOT / top).rglob("*"):
            hidden = any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
            left_out = any(path.is_relative_to(ROOT / other) for other in setup.NOT_IN_A_WHEEL)
            if path.is_file() and not hidden and path.suffix != ".so":
                assert (path in packed) != left_out


def test_a_wheel_is_small_and_holds_what_runs(setup: ModuleType, tmp_path: Path) -> None:
    """Made as bdist_wheel makes it, around the library that is built here: the bound is of a wheel without CUDA."""
    lib = tmp_path / "lib"
    env = {**os.environ, "LOWBIT_CUDA": "0"}

    def run(*commands: str) -> None:
        begin = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "build", "-b", str(tmp_path / "build")]
        command = [*begin, "--build-lib", str(lib), *commands]
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)

    run("build_py")
    if build.CPU.file.exists():
        shutil.copy(build.CPU.file, lib / "lowbit_kernels")
    run("bdist_wheel", "--skip-build", "-b", str(tmp_path / "bdist"), "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") != build.CPU.file.exists()
    assert wheel.stat().st_size <= 3_000_000
    info = wheel.name.split("-py3-none-")[0] + ".dist-info"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = archive.read(f"{info}/METADATA").decode()
    assert {name.partition("/")[0] for name in held} == {"lowbit", "lowbit_kernels", info}
    links = (ROOT / "lowbit" / "evals", ROOT / "lowbit" / "recipes")
    code = [path for top in ("lowbit", "lowbit_kernels") for path in (ROOT / top).rglob("*.py") if not {*path.parents} & {*links}]
    assert {path.relative_to(ROOT).as_posix() for path in code} <= held
    moved = [*(ROOT / "evals").rglob("*.py"), *(ROOT / "recipes").glob("*.yaml")]
    assert {f"lowbit/{path.relative_to(ROOT).as_posix()}" for path in moved} <= held
    assert {"lowbit/py.typed", "lowbit_kernels/py.typed", f"{info}/licenses/LICENSE"} <= held
    left_out = tuple(f"lowbit/{path}{'' if '.' in path else '/'}" for path in setup.NOT_IN_A_WHEEL)
    assert not [
        name for name in held if name.startswith(left_out) or name.endswith((".safetensors", ".pyc", ".o", ".cpp", ".cu"))
    ]
    assert "# lowbit" in metadata
    assert {"Requires-Python: >=3.10", "Requires-Dist: torch>=2.11", "Requires-Dist: numpy<3,>=1.26"} <= set(
        metadata.splitlines()
    )


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/some-one/low.bit.git", "https://github.com/some-one/low.bit"),
        ("https://user:token@github.com/some-one/lowbit", "https://github.com/some-one/lowbit"),
        ("git@gitlab.com:group/part/lowbit.git", "https://gitlab.com/group/part/lowbit"),
        ("ssh://git@codeberg.org/some-one/lowbit/", "https://codeberg.org/some-one/lowbit"),
        ("/srv/git/lowbit.git", None),
    ],
)
def test_the_index_links_to_the_repository(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, remote: str, address: str | None
) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".git").mkdir()
    others = '[core]\n\tbare = false\n[remote "up"]\n\turl = up\n'
    (tmp_path / ".git" / "config").write_text(f'{others}[remote "origin"]\n\turl = {remote}\n')
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert setup.repository() == address
    text = (ROOT / "README.md").read_text()
    if address is None:
        assert setup.project_urls() == {}
        assert setup.readme() == text
        return
    links = re.findall(r"(!?)\[[^\]\n]*\]\(([^)\s]+)\)", setup.readme())
    assert len(links) == len(re.findall(r"\]\([^)\s]+\)", text)) > 20
    assert all(link.startswith("https://") for _, link in links)
    of_repository = [(kind, link.removeprefix(f"{address}/")) for kind, link in links if link.startswith(f"{address}/")]
    for kind, link in of_repository:
        way, release, path = link.split("/", 2)
        assert (way, release) == ("raw" if kind else "blob", setup.release())
        assert (ROOT / path.partition("#")[0]).is_file()
    assert len(of_repository) > 20
    # An sdist keeps the address, and has no git.
    info = "".join(f"Project-URL: {name}, {url}\n" for name, url in setup.project_urls().items())
    shutil.rmtree(tmp_path / ".git")
    (tmp_path / "PKG-INFO").write_text(info)
    assert setup.repository() == address


# ---- which libraries are built ---------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="no library is built on Windows")
def test_the_switch_for_cuda(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CUDA", "1")
    assert {e.name: e.optional for e in setup.extensions()} == {"lowbit_kernels._C": True, "lowbit_kernels._C_cuda": False}
    monkeypatch.setenv("LOWBIT_CUDA", "0")
    assert [e.name for e in setup.extensions()] == ["lowbit_kernels._C"]
    monkeypatch.setenv("LOWBIT_CUDA", "yes")
    with pytest.raises(SystemExit, match=r"LOWBIT_CUDA must be 0 .* or 1 .* got 'yes'"):
        setup.extensions()


def test_cuda_is_left_out_where_torch_has_none(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWBIT_CUDA", raising=False)
    monkeypatch.setattr(setup, "version_of", lambda *_: None)
    assert all(not e.name.endswith("_cuda") for e in setup.extensions())


def test_what_is_missing_is_named(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "_C.so"
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(setup.CompileError, match=r"no C\+\+ compiler found .*: install one"):
        setup.cpu_commands(out, tmp_path)
    with pytest.raises(setup.CompileError, match=r"nvcc not found .*: install the CUDA toolkit"):
        setup.cuda_commands(out, tmp_path)
    monkeypatch.setattr(setup, "find_torch", lambda: None)
    with pytest.raises(setup.CompileError, match=r"no torch 2\.11 or newer .*: pip install torch"):
        setup.cpu_commands(out, tmp_path)


# ---- what is compiled again --------------------------------------------------------------------------------------


def test_units_are_compiled_for_the_instruction_sets_of_their_namespace(setup: ModuleType) -> None:
    found = {source.stem: setup.sets_of(source) for source in (ROOT / "csrc" / "cpu").rglob("*.cpp")}
    for name, sets in found.items():
        assert bool(sets) != name.endswith("_bindings")
        assert set(sets) <= {"portable", "avx2", "avx512", "avx512vnni", "avx512bf16"}


def test_units_are_compiled_for_each_width_that_they_name(setup: ModuleType, tmp_path: Path) -> None:
    sources = list((ROOT / "csrc" / "cpu").rglob("*.cpp"))
    for source in sources:
        assert bool(setup.widths_of(source)) == ("LOWBIT_BITS" in source.read_text())
    objects = [step.out for step in setup.cpu_commands(tmp_path / "_C.so", tmp_path)[:-1]]
    wanted = [
        max(len(setup.widths_of(source)), 1)
        for source in sources
        for name in setup.sets_of(source) or ["portable"]
        if name in setup.INSTRUCTION_SETS
    ]
    assert len(objects) == len(set(objects)) == sum(wanted)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine")
def test_a_header_compiles_what_includes_it(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if setup.find_ninja() is None:
        pytest.skip("no ninja on this machine")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    temp = tmp_path / "a $folder"
    temp.mkdir()
    (tmp_path / "inner.h").write_text("inline int one() { return 1; }\n")
    (tmp_path / "outer.h").write_text('#include "inner.h"\n')
    (tmp_path / "user.cpp").write_text('#include "outer.h"\nint two() { return one() + one(); }\n')
    (tmp_path / "other.cpp").write_text("int three() { return 3; }\n")
    sources = [tmp_path / "user.cpp", tmp_path / "other.cpp"]
    steps = [setup.compiled(source, temp / f"{source.stem}.o", [setup.compiler()]) for source in sources]
    objects = [step.out for step in steps]
    steps.append(
        setup.Step(setup.shortened(temp / "all.o"), objects, [setup.compiler(), "-r", *objects, "-o", "a $folder/all.o"])
    )

    def times() -> list[int]:
        setup.carry_out(steps, temp)
        return [(tmp_path / step.out).stat().st_mtime_ns for step in steps]

    first = times()
    assert times() == first
    (tmp_path / "inner.h").write_text("inline int one() { return 2 - 1; }\n")
    second = times()
    assert [after > before for before, after in zip(first, second, strict=True)] == [True, False, True]


# ---- how it is installed -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    return load_file("lowbit_build", ROOT / "build_backend" / "lowbit_build.py")


def fake_torch(folder: Path, version: str, cuda: str = "None") -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = '{version}'\ncuda: str | None = {cuda}\n")
    return folder


def test_torch_is_found_where_imports_do_not_see_it(backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under pip's isolation, which has a PYTHONPATH of its own."""
    here = Path(torch.__file__).parent
    assert backend.find_torch() == here
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", str(fake_torch(tmp_path / "torch", "1.0").parent))
    assert backend.find_torch() == here


def test_a_torch_that_is_too_old_is_none(backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backend, "_hidden_torch", lambda: None)
    for version, serves in (("2.9.1", False), ("2.10.0+cpu", False), ("2.11.0", True), ("2.13.0a0+git1", True), ("3.0", True)):
        folder = fake_torch(tmp_path / version, version)
        monkeypatch.setattr(backend, "_visible_torch", lambda folder=folder: folder)
        assert (backend.find_torch() is not None) == serves
        assert backend.version_of(folder) == version
        assert backend.version_of(folder, "cuda") is None
    assert backend.version_of(fake_torch(tmp_path / "gpu", "2.11", "'13.0'"), "cuda") == "13.0"


@pytest.mark.skipif(sys.platform == "win32", reason="no library is built on Windows")
def test_only_what_is_missing_is_asked_for(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.build_meta, "get_requires_for_build_wheel", lambda _: ["first"])
    monkeypatch.setattr(backend.build_meta, "get_requires_for_build_editable", lambda _: ["first"])
    asks = (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable)
    monkeypatch.setattr(backend, "find_torch", lambda: ROOT)
    monkeypatch.setattr(backend, "find_ninja", lambda: "ninja")
    assert [ask() for ask in asks] == [["first"], ["first"]]
    monkeypatch.setattr(backend, "find_torch", lambda: None)
    monkeypatch.setattr(backend, "find_ninja", lambda: None)
    wanted = next(line for line in importlib.metadata.requires("lowbit") or [] if line.startswith("torch"))
    assert [ask() for ask in asks] == [["first", wanted, "ninja"]] * 2


def test_an_sdist_holds_what_a_wheel_is_made_of(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in held if name.endswith((".so", ".pyc", ".o"))]
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= held
    assert {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "constraints.txt", "mkdocs.yml"} <= held
    folders = {"lowbit", "lowbit_kernels", "evals", "recipes", "csrc", "build_backend", "docs", "tests"}
    assert {name.partition("/")[0] for name in held if "/" in name} == folders
    for top in folders:
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in held


def linked(environment: Path, names: set[str]) -> None:
    """Installs, by links, what is installed here: distributions and all that they need, but for what may be upgraded there."""
    where = next(environment.glob("lib/python*/site-packages"))
    todo, done = sorted(names), {"setuptools", "ninja"}
    while todo:
        name = re.split(r"[^\w.-]", todo.pop())[0]
        if name in done:
            continue
        done.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra, or of another platform
        todo += [line for line in found.requires or [] if "extra ==" not in line]
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (where / top).exists():
                (where / top).symlink_to(found.locate_file(top))


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine")
def test_the_lines_of_the_readme_in_a_clean_environment(setup: ModuleType, tmp_path: Path) -> None:
    """In a copy of the tree with its objects, so that no more is compiled than what depends on torch."""
    text = (ROOT / "README.md").read_text()
    isolated = re.search(r"```\n(pip install torch\n.*?)```", text, re.DOTALL)
    direct = re.search(r"Without build isolation: `(.*?)` and then\s`(.*?)`", text)
    assert isolated is not None
    assert direct is not None
    tree, environment = tmp_path / "tree", tmp_path / "environment"
    other = (".git", ".*_cache", ".venv", ".hypothesis", "__pycache__", "*.so", "out", "dist", "*.egg-info")
    left_out = shutil.ignore_patterns(*other, "lib.*", "bdist.*", "*_cuda")
    shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
    venv.create(environment, with_pip=True)
    # As `pip install torch` and lowbit's own requirements would, which is a gigabyte.
    linked(environment, {"torch", "numpy", "safetensors", "PyYAML", "rich", "typer"})

    # One ninja for all, that which made the objects: another version reads none of its log, and compiles everything again.
    (tools := tmp_path / "tools").mkdir()
    if ninja := setup.find_ninja():
        (tools / "ninja").symlink_to(ninja)

    def run(lines: str, **variables: str) -> str:
        """The output of ``lines``, with a line for each kernel from ``lowbit env``."""
        lines = lines.replace("lowbit env", "lowbit env --kernels")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOWBIT"))}
        env |= {"PATH": os.pathsep.join(map(str, (tools, environment / "bin", env["PATH"]))), "LOWBIT_CUDA": "0", **variables}
        done = subprocess.run(["bash", "-ec", lines], cwd=tree, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ready = re.compile(r"^ *cpu_gemv +linear +ready$", re.MULTILINE)
    python = shlex.quote(str(environment / "bin" / "python"))
    assert ready.search(run(isolated[1]))
    assert ready.search(run("\n".join([*direct.groups(), "lowbit env"])))
    run(f"{python} -m pip uninstall -qy lowbit")
    without = run(isolated[1], CXX="no-compiler")
    assert not ready.search(without)
    assert "the C++ library is not built: install a C++ compiler" in without


# ---- what is said when it runs ---------------------------------------------------------------------------------


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    library = build.Library(tmp_path / "none.so", "the C++ library", "install a compiler")
    assert library.missing() == "the C++ library is not built: install a compiler"


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "broken.so"
    file.write_text("no library")
    reason = build.Library(file, "the C++ library", "reinstall").missing()
    assert reason is not None
    assert reason.startswith("the C++ library cannot be loaded (")
    assert reason.endswith("): reinstall")


def test_reasons_name_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason in (cpu.available(), cuda.available()):
        assert reason is None or "install" in reason
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "build without CUDA" in (cuda.available() or "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "driver" in (cuda.available() or "")


def test_libraries_never_see_python() -> None:
    for library in (build.CPU, build.CUDA):
        if library.file.exists():
            assert b"PyObject" not in library.file.read_bytes()


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build, "_load", lambda library: f"{library.what} is not built: {library.remedy}")
    monkeypatch.setattr(registry, "_warned", set())
    catalog.invalidate_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    monkeypatch.undo()
    catalog.invalidate_caches()


@pytest.mark.parametrize("scheme", ["int4", "nf4", "fp8", "mxfp4"])
@pytest.mark.parametrize("way", ["module", "gradient", "operator"])
@pytest.mark.usefixtures("no_libraries")
def test_products_on_the_reference_warn_once(scheme: str, way: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    lowbit.quantize_(model, scheme)
    layer = model[0]
    x = torch.randn(2, 64, requires_grad=way == "gradient")
    run = (lambda: torch.nn.functional.linear(x, layer.weight)) if way == "operator" else (lambda: layer(x))
    with pytest.warns(RuntimeWarning, match=r"linear on cpu runs on the reference.* C\+\+ library is not built: install"):
        run()
    run()
    layer(x[:1])


@pytest.mark.usefixtures("no_libraries")
def test_products_on_a_gpu_warn_of_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton, which takes as many, is not there either."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [row for row in registry.kernels() if not row.name.startswith("triton")]
    monkeypatch.setattr(registry, "kernels", lambda: rows)
    call = registry.Call("linear", "cuda", 90, "canonical", lowbit.SCHEMES["int4"], torch.bfloat16, 1, 4096, 4096)
    with pytest.warns(RuntimeWarning, match=r"linear on cuda runs on the reference.* CUDA library is not built: install"):
        registry.warn_of_reference(registry.select(call), call)


def test_no_warning_where_no_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is what there is for such a call, and no installing would change that."""
    monkeypatch.setattr(registry, "_warned", set())
    catalog.invalidate_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = torch.nn.Sequential(torch.nn.Linear(64, 32).double())
        lowbit.quantize_(model, "int4")
        model(torch.randn(2, 64, dtype=torch.float64))
