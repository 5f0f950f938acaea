"""The versioned header of a checkpoint: what each quantized weight is and which number each code stands for.

It is JSON under the key ``lowbit`` of a safetensors file's metadata. ``docs/file-format.md`` describes every field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..formats import FORMATS
from ..packing import packed_size
from ..scheme import PLAIN_SCALES, Scheme
from .tensor_file import CheckpointError, Spec, is_shape, parse_json

__all__ = ["VERSION", "Entry", "Header", "is_quantized"]

VERSION = 2
_READ = (1, 2)
_KEY = "lowbit"
_KINDS = ("linear", "embedding", "parameter")
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class Entry:
    """One quantized weight.

    Attributes:
        kind: ``"linear"`` or ``"embedding"`` (the name is that of a module), ``"parameter"`` (that of a parameter).
        scheme: how the weight is stored.
        shape: of the float weight, [..., N, K]; a module's is [N, K].
        dtype: of the float weight.
        bias, input_scale: whether these tensors stand beside the weight (``"linear"`` only).
        activation: the scheme that inputs are rounded to, or None.
        transposed: whether the parameter is the transpose, [..., K, N], of the weight that is stored (``"parameter"`` only).
    """

    kind: str
    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype
    bias: bool = False
    activation: Scheme | None = None
    input_scale: bool = False
    transposed: bool = False

    @property
    def outward(self) -> tuple[int, ...]:
        """The shape that the module or parameter has."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    def parts(self) -> dict[str, Spec]:
        """What the file holds of the weight, by the part's name: codes of any kind are packed at their format's bits.

        ``packed`` stands where the float weight would, and has a dimension more: whoever takes it for one has to fail.
        """
        scheme, (*lead, n, k) = self.scheme, self.shape
        groups = scheme.groups(k) if k else 0
        packed = Spec(torch.uint8, (*lead, n, packed_size(scheme.bits, k), 1))
        plain = Spec(scheme.scale_dtype, (*lead, n, groups))
        scale = plain if scheme.scale in PLAIN_SCALES else Spec(torch.uint8, (*lead, n, packed_size(scheme.scale_bits, groups)))
        parts = {"packed": packed, "scale": scale}
        if scheme.zero_point != "none":
            codes = Spec(torch.uint8, (*lead, n, packed_size(scheme.bits, groups)))
            parts["zero_point"] = codes if scheme.zero_point == "int" else plain
        if scheme.outer:
            parts["outer"] = Spec(torch.float32, tuple(lead))
        return parts

    def names(self, path: str) -> dict[str, str]:
        """Under which names the file has the parts of the weight of ``path``."""
        codes = path if self.kind == "parameter" else f"{path}.weight" if path else "weight"
        prefix = f"{path}." if path else ""
        return {part: codes if part == "packed" else prefix + part for part in self.parts()}

    def packing(self) -> dict[str, tuple[int, int]]:
        """(bits, codes in a row) of the parts beside ``packed`` whose codes are packed in the file and a byte in memory."""
        scheme, k = self.scheme, self.shape[-1]
        bits = {}
        if scheme.zero_point == "int":
            bits["zero_point"] = scheme.bits
        if scheme.scale not in PLAIN_SCALES:
            bits["scale"] = scheme.scale_bits
        return {part: (width, scheme.groups(k) if k else 0) for part, width in bits.items() if width != 8}

    def formats(self) -> Iterator[str]:
        """Names of the formats that a reader needs the numbers of."""
        for scheme in (self.scheme, self.activation):
            if scheme is not None:
                yield scheme.format
                if scheme.scale not in PLAIN_SCALES:
                    yield scheme.scale

    def to_json(self) -> dict[str, Any]:
        scheme = self.scheme
        return {
            "kind": self.kind,
            "format": scheme.format,
            "group_size": scheme.group_size,
            "zero_point": scheme.zero_point,
            "scale": scheme.scale,
            "outer": scheme.outer,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "bias": self.bias,
            "activation": None if self.activation is None else str(self.activation),
            "input_scale": self.input_scale,
            **({"transposed": True} if self.transposed else {}),
        }


@dataclass
class Header:
    """Everything that a set of files says beside its tensors.

    Attributes:
        quantized: an :class:`Entry` by the name of its module or parameter.
        aliases: names that stand for a tensor stored under another name (tied weights).
        nonpersistent: names of stored buffers that a ``state_dict`` leaves out (rotary frequencies).
        model: what the model was; informative.
        inserted: the settings of each module that the model's class knows nothing of, with its ``kind``, by its name.
        version: of the format; names are those of the present one, whatever the version of the file.
    """

    quantized: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    nonpersistent: list[str] = field(default_factory=list)
    model: dict[str, str] = field(default_factory=dict)
    inserted: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = VERSION

    @property
    def is_plain(self) -> bool:
        """Whether a reader that knows nothing of it gets the model right: nothing is quantized, and nothing was inserted."""
        return not self.quantized and not self.inserted

    @property
    def bits_per_weight(self) -> float | None:
        """Bytes of the quantized weights, with their scales, over their number; None where there are none."""
        unaliased = [entry for path, entry in self.quantized.items() if entry.names(path)["packed"] not in self.aliases]
        weights = sum(math.prod(entry.shape) for entry in unaliased)
        stored_bytes = sum(spec.nbytes for entry in unaliased for spec in entry.parts().values())
        return 8 * stored_bytes / weights if weights else None

    def metadata(self) -> dict[str, str]:
        """The metadata of a safetensors file; ``format`` is what other libraries ask for."""
        names = sorted({name for entry in self.quantized.values() for name in entry.formats()})
        content = {
            "version": VERSION,
            "model": self.model,
            "formats": {name: {"bits": FORMATS[name].bits, "values": _numbers(FORMATS[name].values)} for name in names},
            "quantized": {name: entry.to_json() for name, entry in self.quantized.items()},
            "aliases": self.aliases,
            "nonpersistent": self.nonpersistent,
            **({"inserted": self.inserted} if self.inserted else {}),
        }
        return {"format": "pt", _KEY: json.dumps(content, separators=(",", ":"), allow_nan=False)}

    @staticmethod
    def parse(metadata: dict[str, str], path: str) -> Header:
        """The header in ``metadata``. Raises :class:`CheckpointError` that begins with ``path``."""
        if _KEY not in metadata:
            raise CheckpointError(f"{path}: has no {_KEY!r} in its metadata: not written by lowbit.save, or altered")
        content = parse_json(metadata[_KEY], f"{path}: the lowbit header")
        version = content.get("version")
        if type(version) is not int or version not in _READ:
            remedy = "upgrade lowbit" if type(version) is int and version > VERSION else "the file was altered"
            read = " and ".join(map(str, _READ))
            raise CheckpointError(f"{path}: version {version!s:.40} of the format; this library reads versions {read}: {remedy}")
        for name in ("formats", "quantized", "aliases", "model"):
            if not isinstance(content.get(name), dict):
                raise CheckpointError(f"{path}: the lowbit header needs an object {name!r}")
        for name, entry in content["formats"].items():
            _check_format(name, entry, f"{path}: format {name!r}")
        quantized = {n: _entry(e, content["formats"], f"{path}: quantized weight {n}") for n, e in content["quantized"].items()}
        names = content.get("nonpersistent")
        if not isinstance(names, list) or not all(isinstance(n, str) for n in (*names, *content["aliases"].values())):
            raise CheckpointError(f"{path}: nonpersistent and aliases of the lowbit header must hold names")
        model = {name: str(value) for name, value in content["model"].items()}
        inserted = content.get("inserted", {})
        if not isinstance(inserted, dict) or not all(isinstance(settings, dict) for settings in inserted.values()):
            raise CheckpointError(f"{path}: inserted of the lowbit header must hold the settings of modules")
        found = Header(quantized, content["aliases"], names, model, inserted, version)
        present = {old: new for new, old in found.older_names().items()}
        found.aliases = {present.get(name, name): present.get(stored, stored) for name, stored in found.aliases.items()}
        return found

    def older_names(self) -> dict[str, str]:
        """The names that tensors have in files of this version, by those of the present one, where these differ: version 1 had
        codes, without their last dimension, in ``NAME.packed``."""
        if self.version > 1:
            return {}
        names = {path: entry.names(path)["packed"] for path, entry in self.quantized.items()}
        return {name: f"{path}.packed" if path else "packed" for path, name in names.items()}


def is_quantized(metadata: dict[str, str], path: Path) -> bool:
    """Whether the file at ``path``, which has this ``metadata``, holds what lowbit quantized or rewrote."""
    return _KEY in metadata and not Header.parse(metadata, str(path)).is_plain


def _numbers(values: tuple[float, ...]) -> list[float | str]:
    """JSON has no NaN and no infinity: they are the strings that ``float()`` reads."""
    return [value if math.isfinite(value) else str(value) for value in values]


def _check_format(name: str, entry: Any, label: str) -> None:
    values = entry.get("values") if isinstance(entry, dict) else None
    if not isinstance(values, list) or type(entry.get("bits")) is not int:
        raise CheckpointError(f"{label}: needs bits and values")
    if not FORMATS.has(name):
        raise CheckpointError(
            f"{label} is not in lowbit.FORMATS: install the plug-in that brings it, "
            f"or register it with FORMATS[{name!r}] = Table({name!r}, values)"
        )
    numbers = []
    for value in values:
        special = isinstance(value, str) and value in ("nan", "inf", "-inf")
        if type(value) not in (int, float) and not special:
            raise CheckpointError(f"{label}: values must be numbers, 'nan', 'inf' or '-inf', got {value!s:.40}")
        try:
            numbers.append(float(value))
        except OverflowError as error:
            raise CheckpointError(f"{label}: the number {value!s:.20}... is beyond float64") from error
    registered = FORMATS[name].values
    if len(numbers) != len(registered) or entry["bits"] != FORMATS[name].bits:
        raise CheckpointError(
            f"{label}: the file has {len(numbers)} numbers of {entry['bits']} bits, lowbit.FORMATS {len(registered)}"
        )
    for code, (file_value, registered_value) in enumerate(zip(numbers, registered, strict=True)):
        if not (math.isnan(file_value) and math.isnan(registered_value)) and (file_value, math.copysign(1, file_value)) != (
            registered_value,
            math.copysign(1, registered_value),
        ):
            raise CheckpointError(
                f"{label}: the file's table differs from that of lowbit.FORMATS: code {code} is {file_value} there and "
                f"{registered_value} here; "
                "register the file's table under that name to load it"
            )


def _entry(entry: Any, formats: dict[str, Any], label: str) -> Entry:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{label}: must be an object")
    expected = {
        "kind": str, "format": str, "group_size": int, "zero_point": str, "scale": str, "outer": bool, "shape": list,
        "dtype": str, "bias": bool, "activation": (str, type(None)), "input_scale": bool,
    }  # fmt: skip
    for name, kind in expected.items():
        value = entry.get(name)
        if name not in entry or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):  # type: ignore[arg-type]
            raise CheckpointError(f"{label}: {name} is missing or of the wrong type: {value!s:.40}")
    kind, shape, transposed = entry["kind"], entry["shape"], entry.get("transposed", False)
    if not isinstance(transposed, bool) or (transposed and kind != "parameter"):
        raise CheckpointError(f"{label}: transposed must be true or false, and only a parameter is: {transposed!s:.40}")
    if kind not in _KINDS:
        raise CheckpointError(f"{label}: kind must be one of {', '.join(_KINDS)}, got {kind!r:.40}")
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{label}: dtype must be one of {', '.join(_DTYPES)}, got {entry['dtype']!r:.40}")
    if not is_shape(shape) or len(shape) < 2 or (kind != "parameter" and len(shape) != 2):
        raise CheckpointError(f"{label}: shape must be [N, K], got {shape!s:.80}")
    if math.prod(max(size, 1) for size in shape) >= 1 << 59 or entry["group_size"] >= 1 << 31:
        raise CheckpointError(f"{label}: shape {shape!s:.80} with group_size {entry['group_size']} is larger than any memory")
    if kind != "linear" and (entry["bias"] or entry["input_scale"] or entry["activation"] is not None):
        raise CheckpointError(f"{label}: only a linear layer has a bias, an activation scheme or an input scale")
    try:
        fields = (entry["format"], entry["group_size"], entry["zero_point"], entry["scale"], entry["outer"])
        activation = None if entry["activation"] is None else Scheme.parse(entry["activation"])
        settings = (tuple(shape), _DTYPES[entry["dtype"]], entry["bias"], activation, entry["input_scale"], transposed)
        found = Entry(kind, Scheme(*fields), *settings)
    except ValueError as error:
        raise CheckpointError(f"{label}: {error}") from error
    if activation is not None and activation.group_size >= 1 << 31:
        raise CheckpointError(f"{label}: group_size {activation.group_size} of the activation is larger than any memory")
    if activation is not None and activation.zero_point != "none":
        raise CheckpointError(f"{label}: an activation scheme has no zero point, got {activation}")
    for name in found.formats():
        if name not in formats:
            raise CheckpointError(f"{label}: the header has no table of the format {name!r}")
    return found
