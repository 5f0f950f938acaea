"""Registers lowbit with transformers once transformers' quantizers are imported, before lowbit or after it.

``import lowbit`` does it, and imports nothing for it: where ``transformers.quantizers.auto`` is not loaded yet, a finder waits
in ``sys.meta_path`` for that one name, lets the other finders find it, and is gone once the module has run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["expect"]

_AWAITED = "transformers.quantizers.auto"


class _Finder:
    """Finds nothing of its own: what it does to the module that it waits for is to look at it when it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AWAITED:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register(module)

        loader.exec_module = run_and_register


def _register(module: ModuleType) -> None:
    if hasattr(module, "register_quantizer"):  # transformers 4.50 and later
        from .quantizer import register

        register(module)


def expect() -> None:
    """Register now if transformers' quantizers are loaded, and else when they are."""
    loaded = sys.modules.get(_AWAITED)
    if loaded is not None:
        _register(loaded)
    elif not any(type(finder).__qualname__ == _Finder.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
