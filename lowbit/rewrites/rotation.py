"""Rotation of the residual stream (QuaRot: Ashkboos et al. 2024): an orthogonal matrix Q that spreads every channel over all of
them, folded into the weights, so that no channel stands out and rounding hurts less.

What writes to the stream is multiplied by Q behind, what reads it by Q^T in front. A norm that divides by the root mean square
does the same to x and to x Q once its gain has gone into its readers; one that takes the mean away becomes such a norm where all
that is written has no mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..torch_state import isolated

if TYPE_CHECKING:
    from ..calibration.data import Batch

__all__ = ["check_rotation", "rotation"]

_TOKENS = 64


def check_rotation(online: Any = False, seed: Any = 0) -> None:
    """Raises ``ValueError`` for options that :func:`rotation` cannot take."""
    if not isinstance(online, bool):
        raise ValueError(f"online of rotation must be true or false, got {online!r:.80}")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed of rotation must be a number from 0 on, got {seed!r:.80}")


@isolated()
def rotation(model: nn.Module, batches: Sequence[Batch], *, online: bool = False, seed: int = 0) -> list[str]:
    """Rotate the residual stream of ``model`` in place, by a Hadamard matrix with random signs; what was done, in sentences.

    Args:
        batches: the first is what the model is run on; random tokens where there is none.
        online: also a Hadamard transform of what each down projection reads, computed as the model runs, by a module
            ``transform`` of that layer.
        seed: of the signs.

    Weights are rotated in float64 and rounded to their dtype. Where the gain of the last norm is not 1 a tied head gets a
    weight of its own; where a norm has a bias, readers without one get one. Raises ``ValueError``, and leaves the model as it
    is, where it is not a stream of additions that norms and layers read, or where its output would be another. Takes the
    memory of the model in float32 while it looks for that stream, and in float64 where rounding hides what it finds.
    """
    # Calibration knows recipes, and recipes know this.
    from ..calibration.blocks import call
    from ..calibration.eval_mode import eval_mode
    from ..quantized_module import QuantizedModule
    from .emulation import SAME, check_outputs, distance, outputs, rotated_difference
    from .folding import Folding
    from .hadamard import Rotation
    from .residual_stream import find_residual_stream

    check_rotation(online, seed)
    quantized = next((name for name, module in model.named_modules() if isinstance(module, QuantizedModule)), None)
    if quantized is not None:
        raise ValueError(f"{quantized} is quantized already: rotate the model before")
    batch = _probe(model, batches)
    device = next((parameter.device for parameter in model.parameters()), None)
    with eval_mode(model):
        with _widened(model, torch.float32):
            stream = find_residual_stream(model, batch, device)
            rotation_matrix = Rotation.of(stream.width, seed)
            reference = outputs(call(model, batch, device))
            same = rotated_difference(model, batch, device, stream, rotation_matrix) <= SAME
            folding = Folding(model, stream, rotation_matrix, online)
        if not same:
            # What many layers make of float32's rounding may be more; in float64 only a real difference is left.
            with _widened(model, torch.float64):
                check_outputs(model, _widened_batch(batch), device, stream, rotation_matrix)
        notes = folding.apply()
        worst = distance(reference, outputs(call(model, batch, device)))
    head = (
        f"{stream.width} channels of the residual stream are rotated by {rotation_matrix}: {len(stream.norms)} norms, "
        f"{len(stream.readers)} readers, {len(stream.writers)} writers; outputs differ by {worst:.1e} of the largest"
    )
    return [head, *notes]


def _probe(model: nn.Module, batches: Sequence[Batch]) -> Batch:
    """A short batch: one row of the first one given where it is of tokens, or random tokens."""
    from ..calibration.data import Batch
    from ..calibration.pytree import tree_leaves, tree_map
    from ..checkpoint.hf_config import is_pretrained

    if batches:
        args, kwargs = batches[0]
        tensors = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        ids = [leaf for leaf in tensors if leaf.dim() == 2 and not leaf.is_floating_point()]
        if ids and len(ids) == len(tensors) and len({leaf.shape for leaf in ids}) == 1:

            def cut(leaf: Any) -> Any:
                return leaf[:1, :_TOKENS] if isinstance(leaf, Tensor) else leaf

            return Batch(tree_map(args, cut), tree_map(kwargs, cut))
        return batches[0]
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not is_pretrained(model) or not isinstance(vocabulary, int):
        raise ValueError("rotation runs the model to find what reads and writes its residual stream: give calibration data")
    longest = getattr(model.config, "max_position_embeddings", None) or _TOKENS
    draw = torch.Generator().manual_seed(0)
    return Batch((), {"input_ids": torch.randint(0, vocabulary, (1, min(_TOKENS, longest)), generator=draw)})


@contextlib.contextmanager
def _widened(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """``model`` in ``dtype`` where it is narrower, and then as it was: to a wider dtype and back loses nothing."""
    held = [*model.parameters(), *model.buffers()]
    narrow = [(tensor, tensor.dtype) for tensor in held if tensor.is_floating_point() and tensor.itemsize < dtype.itemsize]
    try:
        for tensor, _ in narrow:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, before in narrow:
            tensor.data = tensor.data.to(before)


def _widened_batch(batch: Batch) -> Batch:
    from ..calibration.data import Batch
    from ..calibration.pytree import tree_map

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return Batch(tree_map(batch.args, wide), tree_map(batch.kwargs, wide))
