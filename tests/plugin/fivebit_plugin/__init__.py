"""A plug-in of lowbit: a format of five bits, a scheme, a rounder, a rewrite, a kernel and a class of modules."""

import torch
from torch import nn

import lowbit
from lowbit.algorithms import ROUNDERS, Rounded, Rounder
from lowbit.formats import Float
from lowbit.rewrites import Method
from lowbit_kernels.registry import Kernel


class Dense(nn.Module):
    """What some code bases have in the place of nn.Linear."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x):
        return x @ self.weight.T + self.bias


def dithered(weight, scheme, statistics, *, seed=0):
    """Round to nearest after adding noise of a hundredth of the largest weight."""
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)).to(weight) - 0.5
    found = ROUNDERS["rtn"].round(weight + 0.01 * weight.abs().max() * noise, scheme, statistics)
    return Rounded(found.codes, found.scales, (f"dithered with seed {seed}",))


def shrink(model, batches, *, factor=1.0):
    """Scale every linear weight: a rewrite that changes nothing where ``factor`` is 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(factor)
    return [f"weights times {factor}"]


def summed(x, packed, scale, zero_point, outer, bias, scheme):
    """The product by way of the reference's dequantized weight, as any kernel would compute it."""
    weight = lowbit.QTensor(packed, scale, zero_point, outer, scheme, (packed.shape[0], x.shape[-1]), x.dtype)
    return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)


def register():
    lowbit.register_format(Float("fp5_e1m3", 1, 3))
    lowbit.register_scheme("tiny_float", "fp5_e1m3:g32:bf16")
    lowbit.register_rounder("dithered", Rounder(dithered, needs_statistics=False, uses_statistics=False))
    lowbit.register_rewrite("shrink", Method(shrink, "model", needs_data=False))
    lowbit.register_kernel(
        Kernel("fivebit_gemm", "linear", summed, "weights rounded once", formats=frozenset({"fp5_e1m3"}), m=(5, 8))
    )
    lowbit.register_module(Dense, "linear")
