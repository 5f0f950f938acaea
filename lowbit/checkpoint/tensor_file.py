"""One safetensors file, read and written a tensor at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and byte range of every tensor)
and the bytes of the tensors. It is read here by hand for three reasons: every claim of a header is checked against the
file before memory is taken for it, the bytes that come out own their memory (a mapped file that is cut short later kills
the process), and a file written twice is the same twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

__all__ = ["CheckpointError", "Spec", "Stored", "TensorFile", "parse_json", "write_tensor_file"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit that other readers of the format keep as well


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that does not fit the model; the message names the file and the tensor."""


class Spec(NamedTuple):
    """What a stored tensor is, without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Stored(NamedTuple):
    """A tensor to be written: ``value()`` makes it when its turn comes, so that one at a time is in memory."""

    name: str
    spec: Spec
    value: Callable[[], Tensor]


# ---- reading ---------------------------------------------------------------------------------------------------


class TensorFile:
    """An open safetensors file whose header has been checked: ``specs`` by name, ``metadata``, and :meth:`read`.

    Raises :class:`CheckpointError` for a file that is missing, cut short, or not what its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, Spec] = {}
        self.metadata: dict[str, str] = {}
        self._starts: dict[str, int] = {}
        try:
            if path.exists() and not path.is_dir() and not path.is_file():  # a pipe would wait for somebody to write
                raise CheckpointError(f"{path}: is no regular file")
            self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, name: str) -> Tensor:
        """The tensor ``name``, on the CPU and in memory of its own."""
        spec = self.specs[name]
        data = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
        self._fill(data.numpy().data, self._starts[name], f"tensor {name}")
        if spec.dtype == torch.bool:
            return data.ne(0).reshape(spec.shape)  # a byte that is neither 0 nor 1 is no bool that torch knows
        return data.view(spec.dtype).reshape(spec.shape)

    def _fill(self, view: memoryview, start: int, label: str) -> None:
        try:
            self._file.seek(start)
            while len(view):
                count = self._file.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{self.path}: the file ends within {label}")
                view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read {label}: {error.strerror or error}") from error

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        prefix = bytearray(8)
        self._fill(memoryview(prefix), 0, "the length of its header")
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{self.path}: claims a header of {length} bytes, and the file has {size}: cut short or altered"
            )
        text = bytearray(length)
        self._fill(memoryview(text), 8, "its header")
        header = parse_json(bytes(text), f"{self.path}: the header")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(f"{self.path}: __metadata__ must map names to strings")
        self.metadata = metadata
        ranges = []
        for name, entry in header.items():
            self.specs[name], start, stop = _checked_entry(entry, f"{self.path}: tensor {name}")
            if stop > size - 8 - length:
                raise CheckpointError(
                    f"{self.path}: tensor {name} ends at byte {stop} of {size - 8 - length}: cut short or altered"
                )
            ranges.append((start, stop, name))
            self._starts[name] = 8 + length + start
        end = 0
        for start, stop, name in sorted(ranges):
            if start != end:
                raise CheckpointError(f"{self.path}: tensor {name} begins at byte {start} of the data, expected {end}")
            end = stop
        if end != size - 8 - length:
            raise CheckpointError(
                f"{self.path}: the header describes {end} bytes of tensors, and the file holds {size - 8 - length}: "
                "cut short or altered"
            )


def _checked_entry(entry: Any, label: str) -> tuple[Spec, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{label}: needs dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{label}: dtype must be one of {', '.join(_DTYPES)}, got {str(entry['dtype'])[:40]!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not is_shape(shape) or not is_shape(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{label}: shape and data_offsets must be whole numbers from 0 on, got {shape!s:.80}, {offsets!s:.80}"
        )
    spec = Spec(dtype, tuple(shape))
    # Zeros in a shape hide the others from its product, and torch still multiplies those for the strides.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63:
        raise CheckpointError(f"{label}: a shape of {shape!s:.80} is larger than any memory")
    if spec.nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(f"{label}: {spec} takes {spec.nbytes} bytes, and the file gives it {offsets[1] - offsets[0]}")
    return spec, offsets[0], offsets[1]


def is_shape(value: Any) -> bool:
    """Whether ``value`` is a list of whole numbers from 0 on."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def parse_json(text: bytes | str, label: str) -> dict[str, Any]:
    """The JSON object in ``text``; :class:`CheckpointError` that begins with ``label`` for anything else, or a name twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice in one object")
        return found

    def refused(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON number")

    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=refused)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label} is no JSON that can be read ({error!s:.120}): cut short or altered") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{label} must be a JSON object, got {type(found).__name__}")
    return found


# ---- writing ---------------------------------------------------------------------------------------------------


def write_tensor_file(path: Path, tensors: Sequence[Stored], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` and ``metadata`` to ``path`` and wait until the disk has them.

    The widest dtypes come first, so that every tensor is aligned. Raises ``OSError`` that names the file.
    """
    ordered = sorted(tensors, key=lambda stored: (-stored.spec.dtype.itemsize, stored.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, spec, _ in ordered:
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(f"{path}: a header of {len(text)} bytes is more than readers take ({_MAX_HEADER}): save fewer layers")
    with named_errors(path), open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, spec, value in ordered:
            tensor = value().detach().to("cpu").contiguous()
            assert Spec(tensor.dtype, tuple(tensor.shape)) == spec
            if spec.nbytes:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        sync(file)


def storable(dtype: torch.dtype) -> bool:
    """Whether the format has a name for ``dtype``."""
    return dtype in _NAMES


def sync(file: Any) -> None:
    """Wait until the disk has what was written to ``file``."""
    file.flush()
    os.fsync(file.fileno())


class named_errors:  # noqa: N801 - reads as a function in a with statement
    """Within the block an ``OSError`` (a full disk) names the file that could not be written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, f"could not write the checkpoint: {error.strerror or error}", str(self.path)) from error
