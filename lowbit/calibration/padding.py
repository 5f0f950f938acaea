"""Which tokens of a batch are padding, for whatever the modules of a model read and give: they count nowhere."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..checkpoint.hf_config import is_pretrained
from .data import Batch
from .pytree import tree_leaves

__all__ = ["Padding"]

_IGNORED = -100  # the label of a token that no loss counts
_STATES = "encoder_hidden_states"


class Padding:
    """What the attention masks of batches of ``model`` say, by keyword or in the place that its ``forward`` gives them.

    A model with an encoder and a decoder reads two rows of tokens with a mask each; labels of -100 stand for the second where it
    is not given. The mask that has the shape of what a module reads is the one that counts. Where both have it, modules of the
    encoder read its tokens, as do those of the decoder that read what the encoder gave; everything else reads the decoder's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._encoder = _encoder_of(model)
        self._crossing = [] if self._encoder is None else [m for m in model.modules() if _STATES in _arguments(m)]
        self._arguments = _arguments(model)
        self._states: set[StorageWeakRef] = set()  # what the encoder gave, in this run
        self._masks: tuple[Batch, list[Tensor]] | None = None  # of the last batch that was asked for

    @contextlib.contextmanager
    def tracking_encoder(self) -> Iterator[None]:
        """Within the block, which runs the model or a part of it once, what its decoder reads of its encoder is seen."""

        def before(module: nn.Module) -> Callable[..., None]:
            names = _arguments(module)

            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                given = {**dict(zip(names, args, strict=False)), **kwargs}.get(_STATES)
                self._states |= {_storage(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}

            return hook

        with contextlib.ExitStack() as hooks:
            for module in self._crossing:
                hooks.callback(module.register_forward_pre_hook(before(module), with_kwargs=True).remove)
            try:
                yield
            finally:
                self._states.clear()

    def without_padding(self, x: Tensor, batch: Batch, name: str = "", read: Tensor | None = None) -> Tensor:
        """``x`` without padding, its tokens in one dimension; as it is where there is none.

        ``x``: what the module ``name`` reads (or gives, where it ``read`` that), [rows, tokens, ...], [tokens, rows, ...] or
        [rows * tokens, ...].
        """
        masks = self._of(batch)
        if len(masks) > 1 and not self._is_encoders(name, x if read is None else read):
            masks = masks[::-1]
        for mask in masks:
            for found in (mask, mask.T, mask.flatten()):
                if x.shape[: found.dim()] == found.shape and (x.dim() > found.dim() or not x.is_floating_point()):
                    return x if bool(found.all()) else x[found.to(x.device)]
        return x

    def _is_encoders(self, name: str, read: Tensor) -> bool:
        inside = self._encoder is not None and (name == self._encoder or name.startswith(f"{self._encoder}."))
        return inside or _storage(read) in self._states

    def _of(self, batch: Batch) -> list[Tensor]:
        """Bool [rows, tokens], the encoder's or only one first."""
        if self._masks is None or self._masks[0] is not batch:
            self._masks = batch, self._found(batch)
        return self._masks[1]

    def _found(self, batch: Batch) -> list[Tensor]:
        given = {**dict(zip(self._arguments, batch.args, strict=False)), **batch.kwargs}
        mask = _mask(given.get("attention_mask"))
        if self._encoder is None:
            return [] if mask is None else [mask]
        labels = given.get("labels")
        second = _mask(given.get("decoder_attention_mask"))
        if second is None and isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
            second = labels != _IGNORED
        # Where one is not given, all tokens of its side count; those of the other side are not to be taken for them.
        first = mask if mask is not None else _all(given.get("input_ids"), given.get("inputs_embeds"))
        second = second if second is not None else _all(given.get("decoder_input_ids"), given.get("decoder_inputs_embeds"))
        return [found for found in (first, second) if found is not None]


def _mask(value: Any) -> Tensor | None:
    return value.bool() if isinstance(value, Tensor) and value.dim() == 2 else None


def _all(*inputs: Any) -> Tensor | None:
    """A mask of all the tokens of the first tensor of ``inputs``."""
    x = next((x for x in inputs if isinstance(x, Tensor) and x.dim() > 1), None)
    return None if x is None else torch.ones(x.shape[:2], dtype=torch.bool)


def _encoder_of(model: nn.Module) -> str | None:
    """The name of the encoder in ``model``, where one of transformers' models in it has a decoder beside it."""
    for module in model.modules():
        if is_pretrained(module) and getattr(module.config, "is_encoder_decoder", False):
            parent: Any = module
            encoder = parent.get_encoder()
            return next((name for name, found in model.named_modules() if found is encoder and encoder is not module), None)
    return None


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of ``module`` in their order."""
    return tuple(inspect.signature(module.forward).parameters)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
