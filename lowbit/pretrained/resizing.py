"""``resize_token_embeddings`` of a model with a quantized head. Embeddings and tied heads take the new rows into their weight;
an untied head transformers replaces by a float layer, which has neither its activation nor what is done to its input.

The method of ``PreTrainedModel`` is wrapped, as :mod:`.saving` wraps ``save_pretrained`` and for the same reason.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..linear import QLinear

__all__ = ["wrap_resize_token_embeddings"]


def wrap_resize_token_embeddings() -> None:
    """Let models keep their quantized head when their vocabulary changes. Rows that stay keep their codes; new ones are rounded
    to nearest."""
    from transformers.modeling_utils import PreTrainedModel

    resize = PreTrainedModel.resize_token_embeddings
    if hasattr(resize, "__lowbit__"):
        return

    @functools.wraps(resize)
    def resize_token_embeddings(self: Any, *args: Any, **options: Any) -> nn.Module:
        head = self.get_output_embeddings()
        embeddings: nn.Module = resize(self, *args, **options)
        made = self.get_output_embeddings()
        if isinstance(head, QLinear) and made is not head:
            head.weight.data, head.bias, head.out_features = made.weight.data, made.bias, made.out_features
            self.set_output_embeddings(head)
        return embeddings

    resize_token_embeddings.__lowbit__ = True  # type: ignore[attr-defined]
    PreTrainedModel.resize_token_embeddings = resize_token_embeddings  # type: ignore[assignment, method-assign]
