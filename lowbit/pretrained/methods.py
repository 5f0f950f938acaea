"""Methods of ``PreTrainedModel``, and of diffusers' ``ModelMixin``, that do something else for quantized models.

The class is changed once there is a quantized model. An attribute of the one model would refer to the model, whose memory would
then outlive the last reference to it, and whose copies would call it on the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["override"]


def override(kind: type, name: str, method: Callable[..., Any], is_quantized: Callable[[Any], bool]) -> None:
    """Let ``model.name(...)`` of the models of class ``kind`` that ``is_quantized`` tells be ``method(before, model, ...)``.

    ``before`` is the method that was there. A second call changes nothing.
    """
    before = getattr(kind, name)
    if hasattr(before, "__lowbit__"):
        return

    @functools.wraps(before)
    def chosen(self: Any, *args: Any, **options: Any) -> Any:
        return method(before, self, *args, **options) if is_quantized(self) else before(self, *args, **options)

    chosen.__lowbit__ = True  # type: ignore[attr-defined]
    setattr(kind, name, chosen)
