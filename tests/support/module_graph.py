"""Who imports whom, read from the source: ``python -m tests.support.module_graph`` lists the modules in layers.

A node is a module or the ``__init__`` of a package. An edge is an import statement anywhere in it, in functions too, but under
``if TYPE_CHECKING``; ``from package import name`` is an edge to ``package.name`` where that is a module, else to ``package``.
That Python runs ``a/__init__`` before ``a.b`` is no edge: it would make a circle of every package that imports a part of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests import ROOT

__all__ = ["circles", "graph", "imports", "layers", "modules"]

Graph = Mapping[str, set[str]]


def modules(*packages: str) -> dict[str, Path]:
    """The files of the modules of ``packages``, by name."""
    return {_name(path): path for package in packages for path in sorted((ROOT / package).rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(source: str, module: str, is_package: bool, typing: bool = True) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import in ``source``, at any depth; name None where the module itself is imported.
    ``typing``: those under ``if TYPE_CHECKING`` too."""
    for node in _nodes(ast.parse(source), typing):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) + 1 - node.level] if node.level else []
            target = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                yield (inner, None) if _is_module(inner) else (target, alias.name)


def _nodes(node: ast.AST, typing: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if typing or not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from _nodes(child, typing)
        else:
            for other in child.orelse:
                yield from _nodes(other, typing)


def graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules of ``files``, each with those of them that it imports."""
    return {
        module: {target for target, _ in imports(path.read_text(), module, path.name == "__init__.py", typing=False)}
        & files.keys() - {module}
        for module, path in files.items()
    }


def layers(edges: Graph) -> Iterator[list[str]]:
    """The modules from the bottom: each layer imports from those before it alone. Ends before the first that is in a circle, or
    imports one."""
    left = {module: set(targets) for module, targets in edges.items()}
    while ready := sorted(module for module, targets in left.items() if not targets & left.keys()):
        yield ready
        for module in ready:
            del left[module]


def circles(edges: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module."""
    reached = {module: _reached(edges, module) for module in edges.keys() - {m for layer in layers(edges) for m in layer}}
    groups = {frozenset(n for n in reached if m in reached[n] and n in reached[m]) for m in reached if m in reached[m]}
    return sorted(sorted(group) for group in groups)


def _reached(edges: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting: list[str] = list(edges[start])
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += edges[module]
    return found


def _listed(edges: Graph) -> Iterable[str]:
    for number, layer in enumerate(layers(edges)):
        yield f"{number}: {', '.join(layer)}"
    yield from (f"circle: {', '.join(group)}" for group in circles(edges))


if __name__ == "__main__":
    print("\n".join(_listed(graph(modules("lowbit", "lowbit_kernels")))))
