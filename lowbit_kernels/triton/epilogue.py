# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""Epilogue of every product: bias, function, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(y):
    small = tl.exp(-tl.abs(y))  # exp(-|y|) cannot overflow
    return tl.where(y < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _apply_epilogue(y, EPILOGUE: tl.constexpr):
    """``EPILOGUE`` of :mod:`lowbit_kernels.epilogues` of each number (float32); NaN stays NaN."""
    if EPILOGUE == "relu":
        y = tl.where(y < 0.0, 0.0, y)
    elif EPILOGUE == "silu":
        y = y * _sigmoid(y)
    elif EPILOGUE == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif EPILOGUE == "gelu_tanh":  # (1 + tanh u) / 2 is the sigmoid of 2 u
        y = y * _sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    else:
        tl.static_assert(EPILOGUE == "none")
    return y


@triton.jit
def store_output(sums, bias, bias_mask, target, mask, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr):
    """Stores ``sums`` (float32) at the pointers ``target``: plus ``bias``, through the epilogue, rounded once."""
    if HAS_BIAS:
        sums += tl.load(bias, mask=bias_mask, other=0.0).to(tl.float32)
    tl.store(target, _apply_epilogue(sums, EPILOGUE).to(target.dtype.element_ty), mask=mask)
