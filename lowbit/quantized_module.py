"""What the quantized modules share: ``weight``, one parameter over a QTensor, and states in every form that was ever written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .packing import packed_size, unpack
from .qtensor import _assemble
from .scheme import Scheme
from .tensor import QTensor

__all__ = ["QuantizedModule", "local_tensor"]

_PARTS = ("packed", "scale", "zero_point", "outer")


class QuantizedModule(nn.Module):
    """A module whose ``weight`` is one :class:`torch.nn.Parameter` over a :class:`QTensor` [N, K].

    It has the shape and dtype of the float weight, which code that casts, moves or counts parameters sees. The QTensor
    knows its scheme and keeps its bytes in the layout that the kernels of its device read; the module knows neither.
    """

    weight: QTensor  # which is a parameter
    activation: Scheme | None = None

    # A program that torch.jit.trace writes has the weight's parts as constants. A weight, which has no storage, could not be
    # saved beside them; torch leaves out what is named here of a module that exports a method.
    __jit_ignored_attributes__ = ("weight", "activation", "_input_quant", "fused")
    __jit_unused_properties__ = ("scheme", "_operator")

    @torch.jit.export
    def _exported(self) -> None:
        return None

    def _adopt(self, weight: Tensor) -> None:
        if is_traceable_wrapper_subclass(weight) and not isinstance(weight, QTensor):  # the shards of a DTensor
            self.register_parameter("weight", weight)
            return
        if not isinstance(weight, QTensor):
            raise TypeError(f"the weight of a {type(self).__name__} is a QTensor, got {type(weight).__name__}{_OF_FSDP1}")
        if weight.transposed or weight.dim() != 2:
            raise ValueError(f"a module's weight is a matrix [N, K] that is not transposed, got {weight!r}")
        if (held := self._parameters.get("weight")) is not None and held.shape != weight.shape:
            raise ValueError(f"the weight of this {type(self).__name__} is {tuple(held.shape)}, got {tuple(weight.shape)}")
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("weight", weight)

    def register_parameter(self, name: str, param: Any) -> None:
        super().register_parameter(name, param)
        if name == "weight":
            self._relayout()

    @property
    def _operator(self) -> str:
        """The operator that reads the weight."""
        return "linear"

    def _relayout(self) -> None:
        """Let the weight lie as this module's kernels read it."""
        weight = local_tensor(self.__dict__.get("_parameters", {}).get("weight"))
        if isinstance(weight, QTensor):
            weight.read_by(self._operator, self.activation)

    @property
    def scheme(self) -> Scheme:
        """The scheme of the weight."""
        return local_tensor(self.weight).scheme

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, Tensor):
            self._adopt(value)
            return
        if name == "activation" and isinstance(weight := self.__dict__.get("_parameters", {}).get("weight"), QTensor):
            weight.readers -= {(self._operator, self.activation)}
        super().__setattr__(name, value)
        if name == "activation":
            self._relayout()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """A state holds ``weight``, or the parts of one as files have them and as states of older versions had.

        Parts may come in several states, as those of a layer that stands in two shards do: the weight changes once it has all,
        and until then they are missing keys.
        """
        state, held = state_dict, self._parameters.get("weight")
        found = _parts_in(state_dict, prefix)
        missing: list[str] = []
        if found and isinstance(held, QTensor):
            state = {name: value for name, value in state_dict.items() if name.removeprefix(prefix) not in _STORED}
            try:
                weight, missing = self._assembled(held, found, state_dict.get(f"{prefix}_extra_state"), prefix)
            except ValueError as error:
                error_msgs.append(str(error))
                return
            if weight is not None:
                state[prefix + "weight"] = weight
        given = state.get(prefix + "weight")
        if isinstance(held, QTensor) and given is not None and (why := _refusal(given, held, prefix)) is not None:
            error_msgs.append(why)
            return
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if missing and strict:
            missing_keys[missing_keys.index(prefix + "weight") :] = missing
        self._relayout()

    def _assembled(self, held: QTensor, found: dict[str, Tensor], extra: Any, prefix: str) -> tuple[QTensor | None, list[str]]:
        """The weight whose parts are ``found``, canonical, or the names of those that have not come yet. Codes of scales and zero
        points are packed in files, and were a byte each in states of older versions, which have ``extra`` state beside them:
        their sizes alone need not tell."""
        scheme, (n, k) = held.scheme, held.shape
        if extra is not None and (described := bytes(extra.tolist()).decode(errors="replace")) != f"{held.scheme_str} K={k}":
            raise ValueError(
                f"the state holds {prefix}weight quantized as {described}, and this module is {held.scheme_str} K={k}"
            )
        wanted = _assemble(dict(held._parts()), scheme, (n, k), held.dtype, held.byte_layout, False).canonical()._parts()
        if odd := found.keys() - wanted.keys():
            raise ValueError(f"the state has {prefix}{min(odd)}, which a {held.scheme_str} weight does without")
        bits = {"zero_point": scheme.bits, "scale": scheme.scale_bits}
        parts: dict[str, Tensor] = self.__dict__.pop("_pending", {})
        for name, part in found.items():
            like = wanted[name]
            if extra is None and name in bits and like.dtype == torch.uint8:
                g = like.shape[-1]
                fits = part.dtype == torch.uint8 and part.shape == (*like.shape[:-1], packed_size(bits[name], g))
                part = unpack(part, bits[name], g) if fits else part[..., :0]
            if (part.dtype, part.shape) != (like.dtype, like.shape):
                raise ValueError(
                    f"size mismatch for {prefix}{name}: {part.dtype} {tuple(part.shape)} in the state, and a "
                    f"{held.scheme_str} weight {(n, k)} has {like.dtype} {tuple(like.shape)}"
                )
            parts[name] = part
        if missing := [prefix + ("weight" if name == "packed" else name) for name in wanted if name not in parts]:
            self.__dict__["_pending"] = parts
            return None, missing
        return _assemble(parts, scheme, (n, k), held.dtype, "canonical", False), []

    def _in_graph(self, x: Proxy) -> Any:
        """The node that torch.fx makes of a call of this layer, as of one of its own: a graph calls the layer as a whole."""
        path = x.tracer.path_of_module(self)  # type: ignore[attr-defined]
        if not path:
            raise ValueError(f"a {type(self).__name__} is one node of a graph: trace a module that holds it")
        return x.tracer.create_proxy("call_module", path, (x,), {})

    def _quantization_repr(self) -> str:
        weight = local_tensor(self.weight)
        return (
            f"{weight.scheme_str}, bits_per_weight={weight.bits_per_weight:.3f}" if isinstance(weight, QTensor) else "no QTensor"
        )


def local_tensor(weight: Any) -> Any:
    """What this process holds of ``weight``, which may be the shards of a DTensor."""
    return getattr(weight, "_local_tensor", weight)


_OF_FSDP1 = (
    "; FullyShardedDataParallel (FSDP1) makes one float tensor of all parameters: use torch.distributed.fsdp.fully_shard (FSDP2)"
)
_STORED = frozenset({"weight", *_PARTS, "_extra_state"})


def _parts_in(state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """The parts of a weight that ``state`` has: codes of a file stand where the float weight would, with a dimension more."""
    found = {name: state[prefix + name] for name in _PARTS if prefix + name in state}
    codes = state.get(prefix + "weight")
    if codes is None:
        return found
    if isinstance(codes, QTensor) or codes.dtype != torch.uint8 or codes.dim() != 3:
        return {}  # a weight in one piece
    return {**found, "packed": codes.squeeze(-1)}


def _refusal(given: Tensor, held: QTensor, prefix: str) -> str | None:
    """Why the weight ``given`` in a state cannot be copied into ``held``, before anything is."""
    if not isinstance(given, QTensor):
        return (
            f"{prefix}weight is a {type(given).__name__} of {given.dtype} in the state, and this weight is quantized as "
            f"{held.scheme_str}: load a quantized state, or load the float model and quantize it"
        )
    if given.scheme != held.scheme or given.shape != held.shape:
        return (
            f"the state holds {prefix}weight quantized as {given.scheme_str} {tuple(given.shape)}, and this module is "
            f"{held.scheme_str} {tuple(held.shape)}"
        )
    return None
