"""Packages that add formats, schemes, kernels, rounders, rewrites or modules: entry points of the group ``lowbit.plugins``.

    [project.entry-points."lowbit.plugins"]
    mine = "my_package.lowbit_plugin"        # a module that registers when it is imported, or module:function

They are loaded when a name is looked up that lowbit does not know, and by every command line; never by ``import lowbit``.
"""

from __future__ import annotations

import importlib.metadata
import threading

__all__ = ["GROUP", "PluginError", "load"]

GROUP = "lowbit.plugins"
_lock = threading.RLock()
_loaded: list[str] | None = None


class PluginError(ImportError):
    """A plug-in cannot be loaded."""


def load() -> list[str]:
    """Load the plug-ins of this environment, once; their names. Raises :class:`PluginError` that names the first broken one, and
    tries again at the next call."""
    global _loaded
    with _lock:
        if _loaded is None:
            found: list[str] = []
            _loaded = found  # a plug-in that looks up its own names does not load itself again
            try:
                for entry in importlib.metadata.entry_points(group=GROUP):
                    _run(entry)
                    found.append(entry.name)
            except BaseException:
                _loaded = None
                raise
        return list(_loaded)


def _run(entry: importlib.metadata.EntryPoint) -> None:
    package = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
    try:
        made = entry.load()
        if callable(made):
            made()
    except Exception as error:
        raise PluginError(
            f"the plug-in {entry.name}{package} ({entry.value}) cannot be loaded ({type(error).__name__}: {error}): "
            "update or uninstall that package"
        ) from error
