"""Which layers of a block read what others of it give, found by running it once: the order in which they can be rounded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .pytree import tree_leaves

__all__ = ["topological_levels"]


def topological_levels(modules: Mapping[str, nn.Module], run: Callable[[], object]) -> list[list[str]]:
    """The names of ``modules`` in steps, each of which reads nothing that a later one gives.

    Its own step is the number of modules one behind the other that come before it, at the most. Those that ``run`` does not
    call stand in the last step, since nothing is known of them.
    """
    depth_mode = _DepthMode()
    found: dict[str, int] = {}

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            found[name] = max(found.get(name, 0), depth_mode.of((args, kwargs)))

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            depth_mode.mark(output, found[name] + 1)

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after(name)).remove)
        with depth_mode:
            run()
    order = sorted(set(found.values())) or [0]
    return [[name for name in modules if found.get(name, order[-1]) == depth] for depth in order]


class _DepthMode(TorchDispatchMode):
    """Gives each tensor that an operator makes, or writes to, the largest depth of those that the operator read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depth: dict[StorageWeakRef, int] = {}  # a weak reference keeps the address from being given away again

    def of(self, value: Any) -> int:
        """The largest depth of the tensors in ``value``."""
        return max((self._depth.get(_key(leaf), 0) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), default=0)

    def mark(self, value: Any, depth: int) -> None:
        """The tensors in ``value``, and all that share their memory, are at least of this depth."""
        for leaf in tree_leaves(value):
            if depth and isinstance(leaf, Tensor):
                key = _key(leaf)
                self._depth[key] = max(depth, self._depth.get(key, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        depth, output = self.of((args, kwargs)), func(*args, **kwargs)
        self.mark(output, depth)
        if depth and func._schema.is_mutable:
            named = zip(func._schema.arguments, args, strict=False)
            self.mark([value for argument, value in named if argument.is_write], depth)
        return output


def _key(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
