"""``resize_token_embeddings`` of a model with a quantized head. Embeddings and tied heads take the new rows into their weight;
an untied head transformers replaces by a float layer, which has neither its activation nor what is done to its input."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..linear import QLinear

__all__ = ["follow_resizing"]


def follow_resizing(model: Any) -> None:
    """Let ``model``, one of transformers', keep its quantized head when its vocabulary changes."""
    model.resize_token_embeddings = _Resizing(model)


class _Resizing:
    """The method of that name of ``model``, which copies and pickles with it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As transformers' own. Rows of a quantized head that stay keep their codes; new ones are rounded to nearest."""
        model = self.model
        head = model.get_output_embeddings()
        embeddings: nn.Module = type(model).resize_token_embeddings(model, *args, **kwargs)
        made = model.get_output_embeddings()
        if isinstance(head, QLinear) and made is not head:
            head.weight.data, head.bias, head.out_features = made.weight.data, made.bias, made.out_features
            model.set_output_embeddings(head)
        return embeddings
