"""CUDA operators called with tensors that do not hold what they say: an exception before anything runs on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import QTensor, Scheme
from lowbit_kernels import cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]
N, K = 256, 512
PRODUCTS = [
    (scheme, layout, m, None)
    for scheme in ("int4", "int8", "nvfp4", "mxfp4", "nf4")
    for layout, rows in (("canonical", (1, 8)), ("mma_fragment", (1, 2, 8, 16, 64, 300)))
    for m in rows
] + [
    (scheme, "canonical", m, activation)
    for scheme, activation in (
        ("int8:row:bf16", "int8:row:fp32"),
        ("int4:g32:bf16", "int8:row:fp32"),
        ("fp8_e4m3fn:row:bf16", "fp8_e4m3fn:row:fp32"),
    )
    for m in (1, 17, 300)
]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    assert cuda.available() is None, cuda.available()


def arguments(scheme: str, layout: str, m: int) -> list[Tensor | None]:
    w = QTensor.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), scheme).cuda().to_layout(layout)
    x, bias = torch.randn(m, K, device="cuda", dtype=torch.bfloat16), torch.ones(N, device="cuda", dtype=torch.bfloat16)
    return [x, w.packed, w.scale, w.zero_point, w.outer, bias]


@pytest.mark.parametrize(("scheme", "layout", "m", "activation"), PRODUCTS)
def test_memory_that_is_gone(scheme: str, layout: str, m: int, activation: str | None) -> None:
    name = str(Scheme.parse(scheme))

    def product(given: list[Tensor | None], static: Tensor | None = None) -> Tensor:
        if activation is None:
            return torch.ops.lowbit.linear(*given, name, layout)
        return torch.ops.lowbit.quantized_linear(*given, name, layout, activation, static)

    good = arguments(scheme, layout, m)
    with lowbit.trace_kernels() as trace:
        y = product(good)
    assert y.isfinite().all()
    assert not any("reference" in entry.kernel for entry in trace.counts)
    for place, part in enumerate(good):
        for left in (0, 1):
            if part is None or not part.numel():  # in mma_fragment the scales lie among the codes
                continue
            given = list(good)
            gone = part.clone()
            gone.untyped_storage().resize_(left)
            given[place] = gone
            with pytest.raises((ValueError, RuntimeError), match="freed or resized"):
                product(given)
    torch.cuda.synchronize()
    assert torch.equal(product(good), y)


@pytest.mark.parametrize("group_size", [2**31 + 32, 2**32 + 32, 2**40, 2**62])
def test_groups_beyond_32_bits_are_the_row(group_size: int) -> None:
    """A group that is longer than the row, whatever its low 32 bits say."""
    x = torch.randn(2, K, device="cuda", dtype=torch.bfloat16)
    for scheme in ("int4:row:bf16", "uint4:row:zint:bf16"):
        w = QTensor.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), scheme).cuda()
        given = x, w.packed, w.scale, w.zero_point, None, 4, w.scheme.fmt.signed
        assert torch.equal(torch.ops.lowbit_cuda.linear(*given, group_size), torch.ops.lowbit_cuda.linear(*given, -1))
    w = QTensor.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), "int4:row:bf16").cuda()
    product, given = torch.ops.lowbit_cuda.w8a8_linear, (x, w.packed, w.scale, None, None, "int4")
    assert torch.equal(product(*given, group_size // 128 * 128), product(*given, -1))
