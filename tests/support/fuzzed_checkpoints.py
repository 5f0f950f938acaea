"""Mutated checkpoint files: ``python -m tests.support.fuzzed_checkpoints COUNT [SEED]`` loads so many.

What loads is dequantized and multiplied.

A file loads or is refused with a CheckpointError; whatever else happens is named with the number of the file, from which
:func:`file_of` makes it again. The files are read in a process of their own, so that one which ends it is found, and the next
goes on behind that.
"""

from __future__ import annotations

import functools
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowbit
from lowbit import CheckpointError, QEmbedding, QLinear, QTensor, Scheme
from lowbit.checkpoint.header import Entry
from lowbit.scheme import SCHEMES
from tests import ROOT

FILE = "model.safetensors"
ROWS, COLUMNS = (0, 1, 3, 32, 64), (0, 1, 31, 32, 64, 96, 512)
ACTIVATIONS = (None, "int8:row:fp32", "fp8_e4m3fn:g32:e8m0", "fp4_e2m1:g16:fp8_e4m3fn:outer")
ODD = (
    *(None, True, False, 0, 1, 2, -1, 3, 32, 64, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, 1 << 64),
    *(-(1 << 63), 10**30, 0.5, -0.0, 1e300, float("nan"), float("inf"), "", "0", "row", "\0", [], {}, [0], [[]], {"a": {}}),
    *("int8", "uint4", "bf16", "e8m0", "fp8_e4m3fn", "U8", "BF16", "F32", "F64", "linear", "embedding", "parameter"),
    *("int8:row:fp32", f"int8:g{1 << 60}:fp32", f"int8:g{1 << 70}:fp32", "uint8:g1:zint:e8m0", "0.packed", "1.scale"),
    *([0, 0], [32, 0], [0, 64], [1 << 40, 0], [0, 1 << 62], [3, 64], [-1, 64], [1, 2, 3]),
)


@functools.cache
def specimens(seed: int) -> tuple[bytes, ...]:
    """Sound files: two layers each, of schemes, sizes and activations at random."""
    draw, found = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        for name in (*SCHEMES, *SCHEMES):
            n, k = draw.choice(ROWS), draw.choice(COLUMNS)
            dtype = draw.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64))
            activation, static = draw.choice(ACTIVATIONS), draw.random() < 0.5
            rounds = None if activation is None else Scheme.parse(activation)
            fixed = torch.tensor(0.5) if static and activation == "int8:row:fp32" else None
            shift = nn.Parameter(torch.ones(n, dtype=dtype)) if draw.random() < 0.5 else None
            weight = QTensor.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype), name)
            other = QTensor.quantize(torch.ones(draw.choice(ROWS), draw.choice(COLUMNS)), draw.choice([*SCHEMES]))
            layers = QLinear(weight, shift, rounds, fixed), QEmbedding(other) if draw.random() < 0.5 else QLinear(other)
            lowbit.save(nn.Sequential(*layers), folder)
            found.append((Path(folder) / FILE).read_bytes())
    return tuple(found)


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def join(entries: Any, data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def file_of(number: int, seed: int = 0) -> bytes:
    """The mutated file of this number."""
    draw = random.Random(f"{seed}-{number}")
    raw = draw.choice(specimens(seed))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            raw = draw.choice((_bytes, _numbers, _length, _value, _value, _value, _sizes))(raw, draw)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):  # nothing is left to be altered so
            break
    return raw


def _bytes(raw: bytes, draw: random.Random) -> bytes:
    """Some bytes of the header."""
    altered, end = bytearray(raw), 8 + int.from_bytes(raw[:8], "little")
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(min(end, len(raw)))
        altered[place] = draw.choice((altered[place] ^ 1, altered[place] ^ 0x80, 0, 0x22, 0x30, 0x39, 0x7D, 0xFF))
    return bytes(altered)


def _numbers(raw: bytes, draw: random.Random) -> bytes:
    """Any of the bytes of tensors: codes, scales and zero points of all kinds."""
    end = 8 + int.from_bytes(raw[:8], "little")
    altered = bytearray(raw)
    for place in range(end, len(raw)):
        if draw.random() < 0.3:
            altered[place] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    return bytes(altered)


def _length(raw: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(raw) + 1)
    return draw.choice((raw[:place], raw + raw[place:], raw[:place] + b"\0" * draw.randint(1, 64) + raw[place:]))


def _value(raw: bytes, draw: random.Random) -> bytes:
    """A value of either header, however deep, another one or none."""
    entries, data = split(raw)
    header = json.loads(entries["__metadata__"]["lowbit"])
    place: Any = header if draw.random() < 0.6 else entries
    while True:
        key = draw.choice([*place] if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], (dict, list)) or not place[key] or draw.random() < 0.1:
            break
        place = place[key]
    if isinstance(place, dict) and draw.random() < 0.1:
        del place[key]
    else:
        place[key] = (
            draw.choice(ODD) if draw.random() < 0.8 or not isinstance(place[key], int) else place[key] + draw.choice((-1, 1))
        )
    if "lowbit" in entries.get("__metadata__", {}):
        entries["__metadata__"]["lowbit"] = json.dumps(header)
    return join(entries, data)


def _sizes(raw: bytes, draw: random.Random) -> bytes:
    """A weight of another size and group, and tensors of as many bytes as that takes: what only the kernels may refuse."""
    entries, data = split(raw)
    header = json.loads(entries["__metadata__"]["lowbit"])
    name = draw.choice([*header["quantized"]])
    entry = header["quantized"][name]
    entry["shape"] = [draw.choice((*ROWS, 1 << 40)), draw.choice((*COLUMNS, 1 << 40, 1 << 62))]
    entry["group_size"] = draw.choice((-1, 1, 2, 7, 16, 32, 48, 64, 1 << 31, 1 << 40, 1 << 60, (1 << 63) - 1))
    fields = {name: entry[name] for name in ("format", "group_size", "zero_point", "scale", "outer")}
    weight = Entry(entry["kind"], Scheme(**fields), tuple(entry["shape"]), torch.float32)
    names = weight.names(name)
    shapes = {names[part]: list(spec.shape) for part, spec in weight.parts().items()} | {f"{name}.bias": entry["shape"][:1]}
    bits, begin, out = {"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "U8": 8}, 0, {"__metadata__": entries.pop("__metadata__")}
    for key, value in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]):
        size = value["data_offsets"][1] - value["data_offsets"][0]
        if key in shapes:
            value["shape"] = shapes[key]
            size = math.prod(value["shape"]) * bits[value["dtype"]] // 8
        value["data_offsets"] = [begin, begin + size]
        begin += size
        out[key] = value
    out["__metadata__"]["lowbit"] = json.dumps(header)
    return join(out, (data * (begin // max(len(data), 1) + 1))[:begin] if 0 <= begin < 1 << 20 else data)


# ---- reading ---------------------------------------------------------------------------------------------------------


def model_for(raw: bytes) -> nn.Module:
    """The float model that a file says it is of, where it says so and memory holds it."""
    try:
        found = json.loads(split(raw)[0]["__metadata__"]["lowbit"])["quantized"]
        layers = []
        for name in ("0", "1"):
            (n, k), is_linear = found[name]["shape"], found[name]["kind"] == "linear"
            dtype = getattr(torch, found[name]["dtype"])
            if n * k > 1 << 20:
                raise ValueError
            with torch.device("meta"):
                layer = (
                    nn.Linear(k, n, found[name].get("bias", False), dtype=dtype) if is_linear else nn.Embedding(n, k, dtype=dtype)
                )
            layers.append(layer.to_empty(device="cpu"))
        return nn.Sequential(*layers)
    except Exception:
        return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3))


def outcome(raw: bytes, folder: Path) -> str:
    """``"loaded"``, ``"refused"``, or what else was raised."""
    (folder / FILE).write_bytes(raw)
    model = model_for(raw)
    try:
        loaded = lowbit.load(folder, model=model)
    except CheckpointError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__} while loading: {error}"
    try:
        for layer in loaded:
            _use(layer)
    except Exception as error:
        return f"{type(error).__name__} while multiplying: {error}"
    return "loaded"


@torch.no_grad()
def _use(layer: nn.Module) -> None:
    n, k = layer.weight.shape
    if isinstance(layer.weight, QTensor):
        layer.weight.dequantize()
    if isinstance(layer, nn.Embedding):
        layer(torch.arange(min(n, 3)))
        return
    for m in (1, 3, 20, 70) if k <= 1 << 16 and n <= 1 << 16 else (0,):
        for dtype in (layer.weight.dtype, torch.float32):
            if layer.bias is None or layer.bias.dtype == dtype:
                assert layer(torch.ones(m, k, dtype=dtype)).shape == (m, n)


def read(first: int, past: int, seed: int) -> None:
    """The numbers of files, each before it is read, and what came of it behind."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, past):
            print(number, end=" ", flush=True)
            signal.alarm(60)  # which ends the process where a file never would
            print(outcome(file_of(number, seed), Path(folder)).replace("\n", " ")[:300], flush=True)


def read_apart(count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How many files loaded, were refused, raised something else or ended the process; and lines that say more of the latter."""
    counts, lines, first = Counter[str](), [], 0
    while first < count:
        program = [sys.executable, "-m", "tests.support.fuzzed_checkpoints", "read", str(first), str(count), str(seed)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            number, said = first - 1, ""
            for line in process.stdout:
                number, said = int(line.split(" ", 1)[0]), line.split(" ", 1)[1].strip()
                kind = said if said in ("loaded", "refused") else "crashed" if not said else "raised"
                counts[kind] += 1
                if kind not in ("loaded", "refused"):
                    lines.append(f"file {number}: {said or 'the process ended'}")
                    print(lines[-1], file=sys.stderr, flush=True)
        if process.returncode == 0:
            break
        if said:  # it ended between two files
            counts["crashed"] += 1
            lines.append(f"behind file {number}: the process ended with {process.returncode}")
        first = number + 1
    return counts, lines


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(*map(int, sys.argv[2:5]))
    else:
        counts, lines = read_apart(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
        print(json.dumps({"files": sum(counts.values()), **counts}))
        sys.exit(1 if lines else 0)
