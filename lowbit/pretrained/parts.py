"""The parts of a quantized weight in a file, put together as transformers reads them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..checkpoint.header import Entry
from ..packing import unpack
from ..tensor import QTensor
from .parallel import cut

__all__ = ["WeightParts"]

_PARTS = ("packed", "scale", "zero_point", "outer")


class WeightParts(WeightConverter):
    """Tells transformers that ``NAME.weight`` (codes), ``NAME.scale`` ... of each quantized layer are one ``NAME.weight``.

    ``stored``: what the header says of each layer, by its name in the files; ``entries``: by its name in the model, which another
    class than that of the files may call otherwise. A pattern, which transformers would search for in every name, could not tell
    a ``scale`` of a quantized layer from that of any other module.
    """

    __slots__ = ("_entries", "_stored")

    def __init__(self, stored: dict[str, Entry], entries: dict[str, Entry]) -> None:
        super().__init__(list(_PARTS), "weight", [_Assembled(entries)])
        self._stored, self._entries = stored, entries

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightParts:  # transformers wants one for each weight
        return WeightParts(self._stored, self._entries)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key in self._stored and self._stored[source_key].kind == "parameter":
            self._was_used = True
            return source_key, "packed"
        path, _, part = source_key.rpartition(".")
        part = "packed" if part == "weight" else part  # as files of version 1 call the codes
        if part not in _PARTS or path not in self._stored:
            return source_key, None
        self._was_used = True
        return path if self._stored[path].kind == "parameter" else f"{path}.weight", part


class _Assembled(ConversionOps):
    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The weight as a parameter, in the dtype of the model's outline."""
        outline, path = model.get_parameter(full_layer_name), full_layer_name
        path = path if path in self._entries else path.rpartition(".")[0]
        entry = self._entries[path]
        parts, packing = dict.fromkeys(_PARTS), entry.packing()
        for part, found in input_dict.items():
            tensor = found[0] if isinstance(found, list) else found
            parts[part] = unpack(tensor, *packing[part]) if part in packing else tensor
        if parts["packed"] is not None and parts["packed"].dim() > len(entry.shape):
            parts["packed"] = parts["packed"].squeeze(-1)
        weight = QTensor(*parts.values(), entry.scheme, entry.shape, outline.dtype, transposed=entry.transposed)
        if (held := getattr(outline, "readers", None)) is not None:
            weight.readers = held  # which a weight that goes to disk has with it
        if hasattr(outline, "_local_tensor"):
            weight = cut(weight, outline, path, entry.activation)
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}
