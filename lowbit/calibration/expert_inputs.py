"""What each expert reads while a model runs, seen in the products with its matrix, however the model comes to them.

A module that keeps the matrices of all its experts in one parameter calls none of them: it indexes the parameter and multiplies,
or multiplies by all of it. So the operators are watched: a factor whose memory is that of a parameter, or a copy of a part of it,
tells by where it begins which experts it is of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ExpertInputs", "Experts"]

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.clone.default)
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


class Experts(NamedTuple):
    """Matrices [E, N, K] in one parameter of a module; ``transposed``: it is [E, K, N]."""

    module: nn.Module
    attribute: str
    transposed: bool

    @property
    def parameter(self) -> Tensor:
        return self.module.get_parameter(self.attribute)

    @property
    def number(self) -> int:
        return self.parameter.shape[0]

    @property
    def k(self) -> int:
        return self.parameter.shape[-2 if self.transposed else -1]


class _Held(NamedTuple):
    """Memory that holds matrices of ``name``: from ``start`` on, ``size`` numbers for each of ``experts``, with rows of ``k``."""

    name: str
    experts: Sequence[int]
    start: int
    size: int
    k: int


class ExpertInputs(TorchDispatchMode):
    """While it is on, ``add(name, expert, x)`` is called with the rows ``x`` [tokens, K] that each expert of ``watched`` reads,
    in every product.

    Of products with all experts at once (``bmm``, as in Llama 4) rows that are all 0 count for nothing: they are of tokens that
    chose another expert. Where one matrix is multiplied in parts, the first part is counted.
    """

    def __init__(self, watched: Mapping[str, Experts], add: Callable[[str, int, Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched, self._add = watched, add
        self._copies: dict[StorageWeakRef, _Held] = {}  # a weak reference keeps the address from being given away again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in _COPIES:
            if (found := self._found(args[0])) is not None and isinstance(output, Tensor):
                held, chosen = found
                self._copies[_key(output)] = held._replace(experts=chosen, start=int(output.storage_offset()))
        elif func is aten.index.Tensor or func is aten.index_select.default:
            self._on_index(func, args, output)
        elif func is aten.mm.default or func is aten.matmul.default or func is aten.bmm.default:
            self._on_product(*args[:2])
        elif func is aten.mv.default:
            self._on_product(args[0], args[1][:, None])
        elif func is aten.linear.default:
            self._on_product(args[0], args[1].t())
        elif func is aten.addmm.default or func is aten.baddbmm.default:
            self._on_product(*args[1:3])
        elif func._schema.name in _GROUPED:
            ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
            if ends is not None and args[0].dim() == 2:
                self._on_grouped(args[0], args[1], ends.tolist())
        return output

    def _found(self, tensor: Any) -> tuple[_Held, Sequence[int]] | None:
        """The memory that ``tensor`` is of, and the experts whose matrices it begins with."""
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not tensor.numel() or tensor.is_meta:
            return None
        held = self._copies.get(_key(tensor))
        if held is None:
            held = next(self._parameters(tensor), None)
        if held is None:
            return None
        first, inside = divmod(int(tensor.storage_offset()) - held.start, held.size)
        count = tensor.shape[0] if tensor.dim() > 2 else 1
        if inside or not 0 <= first <= first + count <= len(held.experts) or held.k not in tensor.shape[-2:]:
            return None
        return held, held.experts[first : first + count]

    def _parameters(self, tensor: Tensor) -> Iterator[_Held]:
        for name, experts in self._watched.items():
            p = experts.parameter
            if not p.is_meta and p.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                end = p.storage_offset() + p.numel()  # several may lie in one storage, as a folder's tensors in memory do
                if p.storage_offset() <= tensor.storage_offset() < end:
                    yield _Held(name, range(p.shape[0]), int(p.storage_offset()), p[0].numel(), experts.k)

    def _on_index(self, func: Any, args: Any, output: Any) -> None:
        """A copy of the matrices of chosen experts."""
        chosen = args[1][0] if func is aten.index.Tensor else args[2]
        along_first = len(args[1]) == 1 if func is aten.index.Tensor else args[1] == 0
        if isinstance(args[0], Tensor) and args[0].dim() == 3 and along_first and chosen is not None:
            found = self._found(args[0])
            if found is not None and chosen.dtype != torch.bool:
                held, experts = found
                picked = [experts[i] for i in chosen.reshape(-1).tolist()]
                self._copies[_key(output)] = held._replace(experts=picked, start=int(output.storage_offset()))

    def _on_product(self, a: Tensor, b: Tensor) -> None:
        """``a`` times ``b``, matrices or batches of them, of which either may be of experts."""
        found, weight, x = self._found(b), b, a
        if found is None:
            found, weight, x = self._found(a), a, b.transpose(-1, -2) if b.dim() > 1 else b
        if found is None or found[0].k != x.shape[-1]:
            return
        held, experts = found
        if weight.dim() == 2:
            self._add(held.name, experts[0], x.reshape(-1, held.k))
            return
        rows: dict[int, list[Tensor]] = {}
        for expert, read in zip(experts, x, strict=True):
            rows.setdefault(expert, []).append(read[read.any(-1)])
        for expert, pieces in rows.items():
            self._add(held.name, expert, torch.cat(pieces))

    def _on_grouped(self, x: Tensor, weight: Tensor, ends: list[int]) -> None:
        found = self._found(weight)
        if found is None or found[0].k != x.shape[-1]:
            return
        for expert, start, end in zip(found[1], [0, *ends[:-1]], ends, strict=True):
            if end > start:
                self._add(found[0].name, expert, x[start:end])


def _key(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
