"""``resize_token_embeddings`` of a model with a quantized head. Embeddings and tied heads take the new rows into their weight;
an untied head transformers replaces by a float layer, which has neither its activation nor what is done to its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..linear import QLinear

__all__ = ["resize_token_embeddings"]


def resize_token_embeddings(resize: Callable[..., nn.Module], model: Any, *args: Any, **options: Any) -> nn.Module:
    """``resize(model, ...)``, after which the head is quantized as before.

    Rows that stay keep their codes, new ones are rounded to nearest.
    """
    head = model.get_output_embeddings()
    embeddings = resize(model, *args, **options)
    made = model.get_output_embeddings()
    if isinstance(head, QLinear) and made is not head:
        head.weight.data, head.bias, head.out_features = made.weight.data, made.bias, made.out_features
        model.set_output_embeddings(head)
    return embeddings
