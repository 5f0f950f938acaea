"""Registers lowbit with other libraries once the module of theirs that knows of quantizers, or that places weights, is imported,
before lowbit or after it; and with torch's counter of operations, which imports Triton.

``import lowbit`` does it, and imports nothing for it: where a module in :data:`IMPORT_HOOKS` is not loaded yet, a finder waits in
``sys.meta_path`` for that one name, lets the other finders find it, and is gone once the module has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["IMPORT_HOOKS", "install"]


def _transformers(module: ModuleType) -> None:
    if hasattr(module, "register_quantizer"):  # transformers 4.50 and later
        from . import quantizer

        if hasattr(quantizer, "register"):  # else that module is what imports transformers, and registers at its end
            quantizer.register(module)


def _accelerate(module: ModuleType) -> None:
    from ..placement import wrapping

    wrap = {
        "modeling": wrapping.wrap_accelerate,
        "big_modeling": wrapping.wrap_dispatching,
        "checkpointing": wrapping.wrap_checkpointing,
    }
    wrap[module.__name__.rpartition(".")[2]](module)


def _counter(module: ModuleType) -> None:
    from lowbit_kernels.flops import register

    register(module)


def _diffusers(module: ModuleType) -> None:
    if find_spec("transformers") is None:  # whose class lowbit.Config is made of
        return
    from ..diffusion.quantizer import register

    register(module)


def _sentences(module: ModuleType) -> None:
    from .sentence_transformers import wrap_modules

    wrap_modules(module.Module)


IMPORT_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.quantizers.auto": _transformers,
    "accelerate.utils.modeling": _accelerate,
    "accelerate.big_modeling": _accelerate,
    "accelerate.checkpointing": _accelerate,
    "torch.utils.flop_counter": _counter,
    "diffusers.quantizers.auto": _diffusers,
    "sentence_transformers.base.modules.module": _sentences,
}
"""Modules by name, and what is called with each once it has run."""


class _Finder:
    """Finds nothing of its own: what it does to the module that it waits for is to look at it when it has run."""

    def __init__(self, module_name: str) -> None:
        self.module_name = module_name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module_name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._wrap_loader(spec.loader)
                return spec
        return None

    def _wrap_loader(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            IMPORT_HOOKS[self.module_name](module)

        loader.exec_module = run_and_register


def install() -> None:
    """Register now with what is loaded, and with the others when they are."""
    installed = [
        finder for finder in sys.meta_path if type(finder).__qualname__ == _Finder.__qualname__
    ]  # of a copy of this module, too
    awaited_modules = {getattr(finder, "module_name", None) for finder in installed}
    for name, register in IMPORT_HOOKS.items():
        loaded = sys.modules.get(name)
        if loaded is not None:
            register(loaded)
        elif name not in awaited_modules:
            sys.meta_path.insert(0, _Finder(name))
