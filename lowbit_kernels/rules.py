"""Autograd rules: what :mod:`.schemas` registers of an operator's gradients. Imports torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function as single_level
from torch.autograd import Function, forward_ad

__all__ = ["Rule", "refused", "register", "save"]


class Rule(NamedTuple):
    """The gradients of an operator.

    ``setup(ctx, inputs, output)`` saves tensors, by :func:`save`.

    ``backward(ctx, *gradients)`` gives a result for each input; ``ctx.needs_input_grad`` starts with an entry more.
    ``ctx.saved_tensors`` is to be read once: each reading unpacks all of them, which checkpointing allows once.

    ``jvp(ctx, *tangents)`` gives the tangent of the output, for forward mode; tangents are None where inputs have none.
    """

    setup: Callable[..., None]
    backward: Callable[..., tuple[Tensor | None, ...]]
    jvp: Callable[..., Tensor]


def register(library: torch.library.Library, name: str, rule: Rule) -> None:
    """Give the operator ``name`` its rule.

    ``torch.library.register_autograd`` gives rules that raise under torch.func's transforms, and drop tangents.
    """
    operator = getattr(torch.ops.lowbit, name).default
    arguments = operator._schema.arguments
    below = torch._C._after_autograd_keyset

    def run(keyset: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & below, *inputs)

    def forward(keyset: Any, *inputs: Any) -> Any:
        # torch disabled both modes for this block; enclosing transforms need them.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return run(keyset, *inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)  # None instead of zeros where no gradient is given
        rule.setup(ctx, inputs[1:], output)

    def gradients(ctx: Any, *above: Any) -> Any:
        if all(grad is None for grad in above):
            return (None,) * len(ctx.needs_input_grad)
        return None, *rule.backward(ctx, *above)

    def tangent(ctx: Any, keyset: Any, *tangents: Any) -> Any:
        return rule.jvp(ctx, *tangents)

    functions: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": gradients,
        "jvp": tangent,
    }
    function: Any = type(
        f"Lowbit{name.title().replace('_', '')}", (Function,), {k: staticmethod(f) for k, f in functions.items()}
    )

    def kernel(keyset: Any, *inputs: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        if not wanted and forward_ad._current_level < 0:
            return run(keyset, *inputs)
        defaults = [argument.default_value for argument in arguments[len(inputs) :]]  # the dispatcher omits defaults
        with single_level():  # transforms run this once for each level, as for torch's own operators
            return super(Function, function).apply(keyset, *inputs, *defaults)

    library.impl(name, kernel, "Autograd", with_keyset=True)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves ``tensors`` for the backward pass, and for tangents while those are computed."""
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0:  # otherwise they would be kept alive beyond hooks of saved tensors
        ctx.save_for_forward(*tensors)


def refused(message: str) -> Rule:
    """The rule of an operator without a gradient: ``RuntimeError`` with ``message`` where one is requested."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved."""

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(message)

    return Rule(setup, refuse, refuse)
