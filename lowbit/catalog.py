"""Values by name of which anyone may add some at any time; what was worked out from them is forgotten when one is added.

Formats, schemes, layouts, epilogues, kernels, rounders and rewrites are such values. A cache of something that follows from them
is made by :func:`cached`, or forgotten by what :func:`on_change` was given: then it makes no difference whether a value was added
before the first product or between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import _lru_cache_wrapper, lru_cache, wraps
from typing import Any, TypeVar

from . import plugins

__all__ = ["Catalog", "invalidate_caches", "generation", "cached", "on_change"]

V = TypeVar("V")
F = TypeVar("F", bound=Callable[[], object])
R = TypeVar("R")

_forget: list[Callable[[], object]] = []
_generation = 0


def invalidate_caches() -> None:
    """Forget all that was worked out from values by name."""
    global _generation
    _generation += 1
    for forget in _forget:
        forget()


def generation() -> int:
    """How often something was forgotten: what was begun before that is not kept."""
    return _generation


def on_change(forget: F) -> F:
    """Call ``forget`` whenever something is added, exchanged or removed."""
    _forget.append(forget)
    return forget


def cached(maxsize: int) -> Callable[[Callable[..., R]], _lru_cache_wrapper[R]]:
    """``functools.lru_cache`` for what follows from values by name."""

    def decorate(function: Callable[..., R]) -> _lru_cache_wrapper[R]:
        @lru_cache(maxsize=maxsize)
        @wraps(function)
        def found(*args: Any) -> R:
            while True:
                before = _generation
                result = function(*args)
                if before == _generation:  # another thread may have added something meanwhile
                    return result

        on_change(found.cache_clear)
        return found

    return decorate


class Catalog(dict[str, V]):
    """Values by name. Those that it is made of are the library's own and stay: compiled kernels know some by their names.

    ``label`` names it in messages. ``check(name, value)`` raises for what cannot be added under a name.
    """

    def __init__(self, label: str, builtins: Mapping[str, V], check: Callable[[str, V], None]) -> None:
        for name, value in builtins.items():
            check(name, value)
        super().__init__(builtins)
        self._label, self._builtins, self._check = label, dict(builtins), check

    def has(self, name: str) -> bool:
        """Whether there is a value of this name; plug-ins are loaded before the answer is no."""
        return name in self or (bool(plugins.load()) and name in self)

    def ordered_names(self) -> list[str]:
        """All names, those from elsewhere first and in the order of the alphabet: the order of adding counts for nothing."""
        return [*sorted(name for name in self if name not in self._builtins), *self._builtins]

    def builtin_names(self) -> frozenset[str]:
        """The names that the library itself has given."""
        return frozenset(self._builtins)

    def _refuse_builtin(self, name: str, value: V | None) -> None:
        if name in self._builtins and self._builtins[name] != value:
            raise ValueError(f"{self._label}[{name!r}] is the library's own and stays: give yours another name")

    def __setitem__(self, name: str, value: V) -> None:
        self._check(name, value)
        self._refuse_builtin(name, value)
        super().__setitem__(name, value)
        invalidate_caches()

    def __delitem__(self, name: str) -> None:
        self._refuse_builtin(name, None)
        super().__delitem__(name)
        invalidate_caches()

    # dict's own do not come by the two above.

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, V]:
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        """Remove all but the library's own."""
        for name in [name for name in self if name not in self._builtins]:
            del self[name]

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, other: Mapping[str, V] | Iterable[tuple[str, V]] = (), /, **named: V) -> None:  # type: ignore[override]
        for name, value in dict(other, **named).items():
            self[name] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self
