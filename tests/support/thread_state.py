"""What torch and lowbit hold for a thread beside its tensors, by name: a test that leaves some of it changes the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch, _is_any_autocast_enabled, _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad

from lowbit_kernels import inlined, registry

__all__ = ["thread_state"]


def thread_state() -> dict[str, Any]:
    return {
        "autocast": _is_any_autocast_enabled(),
        "default device": str(torch.get_default_device()),
        "default dtype": torch.get_default_dtype(),
        "dispatch modes": _len_torch_dispatch_stack(),
        "forward gradients": forward_ad._current_level,
        "function modes": _len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "inline": inlined.active(),
        "jit.trace": _is_tracing(),
        "kernels observed": registry.observed.get(),
        "threads": torch.get_num_threads(),
        "transforms": _functorch.peek_interpreter_stack() is not None,
    }
