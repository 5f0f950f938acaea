"""Which modules of a model are PEFT's adapters: small, float and trained, beside the layers that they change."""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["adapters"]

_OF_THE_MODEL = ("base_layer", "original_module")  # what PEFT's wrappers call the module that was there before
_WRAPPERS = (
    ("peft.tuners.tuners_utils", "BaseTunerLayer"),  # LoRA and its like
    ("peft.utils.other", "AuxiliaryTrainingWrapper"),  # modules_to_save, trainable tokens
)


def adapters(model: nn.Module) -> set[nn.Module]:
    """The modules within ``model`` that PEFT added: what its wrappers hold beside the wrapped module, and prompt encoders."""
    wrappers = tuple(kind for place, name in _WRAPPERS if isinstance(kind := _loaded(place, name), type))
    prompts = _loaded("peft.peft_model", "PeftModel")
    found: set[nn.Module] = set()
    for module in model.modules() if wrappers else ():
        if isinstance(module, wrappers):
            for name, child in module.named_children():
                found.update(() if name in _OF_THE_MODEL else child.modules())
        elif isinstance(prompts, type) and isinstance(module, prompts):
            encoder = module._modules.get("prompt_encoder")
            found.update(() if encoder is None else encoder.modules())
    return found


def _loaded(place: str, name: str) -> object:
    # Only a program that uses PEFT has a model of it, and then the module is loaded.
    return getattr(sys.modules.get(place), name, None)
