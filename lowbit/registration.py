"""Adding to lowbit from outside, at any time and in any order; what it has of its own stays under its name.

A package does so in an entry point of the group ``lowbit.plugins`` (:mod:`lowbit.plugins`); a program may also call these.
"""

from __future__ import annotations

from torch import nn

from lowbit_kernels.registry import Kernel, register

from .algorithms import ROUNDERS, Rounder
from .formats import FORMATS, Format
from .layers import MODULES
from .rewrites import REWRITES, Method
from .scheme import SCHEMES, Scheme

__all__ = [
    "register_format",
    "register_kernel",
    "register_module",
    "register_rewrite",
    "register_rounder",
    "register_scheme",
]


def register_format(fmt: Format) -> Format:
    """Let schemes use ``fmt`` (``Int``, ``Float`` or ``Table`` make one) by its name, in operators and files as well.

    Raises ``ValueError`` where lowbit has a format of that name.
    """
    FORMATS[fmt.name] = fmt
    return fmt


def register_scheme(name: str, scheme: Scheme | str) -> Scheme:
    """Let recipes and the command line use ``scheme`` (a :class:`~lowbit.Scheme` or its canonical name) by ``name``.

    Files hold the canonical name, so that they load where nobody registered the name. Raises ``ValueError`` where lowbit has a
    scheme of that name.
    """
    SCHEMES[name] = scheme if isinstance(scheme, Scheme) else Scheme.parse(scheme)
    return SCHEMES[name]


def register_kernel(kernel: Kernel) -> Kernel:
    """Add a row to the registry of kernels (``lowbit_kernels.registry.Kernel``): it is asked before lowbit's own.

    Raises ``ValueError`` where there is a kernel of that name.
    """
    return register(kernel)


def register_rounder(name: str, rounder: Rounder) -> Rounder:
    """Let recipes choose codes by ``rounder`` (``lowbit.algorithms.Rounder``), as ``"name(int4, option=1)"``.

    Raises ``ValueError`` where lowbit has a rounder or rewrite of that name.
    """
    if name in REWRITES:
        raise ValueError(f"there is a rewrite named {name!r}: give the rounder another name")
    ROUNDERS[name] = rounder
    return rounder


def register_rewrite(name: str, method: Method) -> Method:
    """Let recipes rewrite a model by ``method`` (``lowbit.rewrites.Method``) before it is rounded, as ``"name(int4)"``.

    Raises ``ValueError`` where lowbit has a rounder or rewrite of that name.
    """
    if name in ROUNDERS:
        raise ValueError(f"there is a rounder named {name!r}: give the rewrite another name")
    REWRITES[name] = method
    return method


def register_module(cls: type[nn.Module], kind: str) -> None:
    """Let modules of the class ``cls`` itself, and of none below it, be quantized as layers of ``kind``.

    Args:
        cls: has a parameter ``weight`` and may have a ``bias``.
        kind: ``"linear"`` (``x @ weight.T + bias``, weight [N, K]), ``"conv1d"`` (``x @ weight + bias``, weight [K, N]) or
            ``"embedding"`` (rows of weight [N, K]); what its ``forward`` does beside that is not looked for, and is lost.
    """
    MODULES[cls] = kind
