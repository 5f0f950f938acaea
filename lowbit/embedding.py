"""QEmbedding: a table of quantized rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from .quantized_module import QuantizedModule
from .tensor import QTensor

__all__ = ["QEmbedding"]


class QEmbedding(QuantizedModule, nn.Embedding):  # type: ignore[misc]
    """Looks rows up in a quantized weight [num_embeddings, embedding_dim] and dequantizes those rows alone."""

    def __init__(self, weight: QTensor, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        self._adopt(weight)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False

    @property
    def _operator(self) -> str:
        return "embedding"

    def forward(self, input: Tensor) -> Tensor:
        """``input``, indices of any shape, to [..., embedding_dim]."""
        return self._in_graph(input) if isinstance(input, Proxy) else F.embedding(input, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self._quantization_repr()}"
