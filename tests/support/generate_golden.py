"""Writes the golden files: small checkpoints of every version of the format, with the numbers that they stand for.

``python -m tests.support.generate_golden`` writes those of the present version into ``tests/golden/version<N>``. Folders of older
versions are never written again: they are what keeps old files readable. The weights are patterns of codes and scales
rather than rounded floats, so that the bytes depend on the file format alone.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lowbit
from lowbit.checkpoint.header import VERSION
from lowbit.embedding import QEmbedding
from lowbit.grid import Scales
from lowbit.linear import QLinear
from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit.tensor import QTensor
from tests import ROOT

GOLDEN = ROOT / "tests" / "golden"
K = 149  # odd, so that planes, groups and zero points all end in the middle of a byte

SCHEMES = {
    "int1": "int1:g64:bf16",
    "int2": "uint2:g64:zint:bf16",
    "int3": "uint3:g128:zint:bf16",
    "int4": "uint4:g128:zint:bf16",
    "int4-one-scale-a-row": "uint4:row:zint:fp32",
    "int5-float-zero-points": "uint5:g64:zfloat:fp16",
    "int7": "uint7:g128:zint:bf16",
    "int8": "int8:row:bf16",
    "ternary": "ternary:g64:bf16",
    "nf4": "nf4:g64:bf16",
    "fp5": "fp5_e2m2:g128:bf16",
    "fp6": "fp6_e2m3:g128:bf16",
    "fp8": "fp8_e4m3fn:row:bf16",
    "mxfp4": "fp4_e2m1:g32:e8m0",
    "mxint8": "mxint8:g32:e8m0",
    "nvfp4": "fp4_e2m1:g16:fp8_e4m3fn:outer",
    "narrow-scales": "int4:g32:uint6",
}


def pattern(*shape: int) -> Tensor:
    """Whole numbers that look like nothing in particular, int64."""
    x = torch.arange(math.prod(shape))
    return ((x * 7 + x // 5 + x * x // 11) % 1021).reshape(shape)


def weight(scheme_str: str, n: int, k: int = K) -> QTensor:
    """A weight [n, k] that uses every code its format produces."""
    scheme = Scheme.parse(scheme_str)
    groups = scheme.groups(k)
    produced = torch.tensor([code for _, code in scheme.fmt._grid], dtype=torch.uint8)
    codes = produced[pattern(n, k) % len(produced)]
    if scheme.scale in PLAIN_SCALES:
        scale = ((1 + pattern(n, groups) % 16 / 16) / 64).to(scheme.scale_dtype)
    elif scheme.scale == "e8m0":
        scale = (118 + pattern(n, groups) % 9).to(torch.uint8)
    else:
        scale = (17 + pattern(n, groups) % 47).to(torch.uint8)
    zero_point = None
    if scheme.zero_point == "int":
        zero_point = (pattern(n, groups) % 2**scheme.bits).to(torch.uint8)
    elif scheme.zero_point == "float":
        zero_point = (pattern(n, groups) % 64 / 4).to(scheme.scale_dtype)
    outer = torch.tensor(0.0078125 * 3) if scheme.outer else None
    return QTensor.from_codes(codes, Scales(scale, zero_point, outer), scheme, torch.bfloat16)


def layers(scheme_str: str) -> nn.ModuleDict:
    """A quantized embedding, a float norm and a quantized linear layer with a bias."""
    bias = nn.Parameter((pattern(3) / 128).to(torch.bfloat16))
    model = nn.ModuleDict({"embedding": QEmbedding(weight(scheme_str, 5)), "norm": nn.LayerNorm(4)})
    model["linear"] = QLinear(weight(scheme_str, 3), bias)
    return model


def tied() -> nn.ModuleDict:
    """An embedding and a head of the same bytes."""
    model = layers("uint4:g32:zint:bf16")
    model["linear"] = QLinear(model["embedding"].weight)
    return model


def activations() -> nn.ModuleDict:
    """Inputs rounded to int8, under a fixed scale."""
    model = layers("int8:row:bf16")
    model["linear"] = QLinear(weight("int8:row:bf16", 3), None, Scheme.parse("int8:row:fp32"), torch.tensor(0.0625))
    return model


def float_layers(rows: int = 3, bias: bool = True) -> nn.ModuleDict:
    """What the golden files are loaded into."""
    return nn.ModuleDict({"embedding": nn.Embedding(5, K), "norm": nn.LayerNorm(4), "linear": nn.Linear(K, rows, bias=bias)})


def write(folder: Path, model: nn.ModuleDict, limit: int = 1 << 30) -> None:
    """The checkpoint, and beside it the float32 numbers of each quantized weight."""
    lowbit.save(model, folder, max_shard_bytes=limit)
    for name in ("embedding", "linear"):
        np.save(folder / f"{name}.npy", model[name].weight.dequantize(torch.float32).numpy())


def generate(root: Path) -> None:
    """Every golden checkpoint of the present version, a folder each."""
    for name, scheme_str in SCHEMES.items():
        write(root / name, layers(scheme_str))
    write(root / "tied", tied())
    write(root / "activations", activations())
    write(root / "sharded", layers("uint3:g32:zint:bf16"), limit=400)


if __name__ == "__main__":
    target = GOLDEN / f"version{VERSION}"
    shutil.rmtree(target, ignore_errors=True)
    generate(target)
