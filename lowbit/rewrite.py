"""A rewrite as a recipe has it: which one, and with which options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .options import Options, normalized_options
from .rewrites import REWRITES, Method

__all__ = ["Rewrite"]


@dataclass(frozen=True)
class Rewrite:
    """What is done to the float model before it is rounded.

    Attributes:
        name: a key of ``lowbit.rewrites.REWRITES``.
        options: by name: a mapping, which is kept as sorted pairs.
    """

    name: str
    options: Options = ()

    def __post_init__(self) -> None:
        if not REWRITES.has(self.name):
            raise ValueError(f"no rewrite named {self.name!r}; there are {', '.join(REWRITES)}")
        object.__setattr__(self, "options", normalized_options(self.name, self.options, self.method.options, self._check))

    def _check(self, insert: Any = True, **options: Any) -> None:
        if not isinstance(insert, bool):
            raise ValueError(f"insert must be true or false, got {insert!r}")
        self.method.check(**options)

    @property
    def method(self) -> Method:
        return REWRITES[self.name]

    @staticmethod
    def of(value: Any) -> Rewrite:
        """A rewrite from its name, or from a mapping of its name to its options. Raises ``ValueError`` for anything else."""
        if isinstance(value, Rewrite):
            return value
        if isinstance(value, str):
            return Rewrite(value)
        if isinstance(value, Mapping) and len(value) == 1:
            ((name, options),) = value.items()
            if options is None or isinstance(options, Mapping):
                return Rewrite(str(name), tuple((options or {}).items()))
        raise ValueError(
            f"a rewrite is a name or a name with options, such as {{smoothquant: {{alpha: 0.5}}}}, got {value!r:.80}"
        )

    def to_plain(self) -> str | dict[str, Any]:
        """Plain data that :meth:`of` takes."""
        return {self.name: dict(self.options)} if self.options else self.name

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.name}({options})" if options else self.name
