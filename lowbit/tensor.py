"""QTensor, with all that torch's operators mean on it: :mod:`lowbit.qtensor` is the class, and the modules that are imported here
fill its tables."""

from . import expert_products, tensor_arithmetic, tensor_products, tensor_shards, tensor_writes  # noqa: F401 - define operators
from .qtensor import QTensor, RoundingError, check_weight

__all__ = ["QTensor", "RoundingError", "check_weight"]
