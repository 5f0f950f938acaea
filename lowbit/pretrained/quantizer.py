"""The quantizer that transformers calls around the loading and saving of a model.

Which of its methods are called, and when, was read from transformers 5.9 to 5.23; older ones are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from ..placement.disk import wrap_offload_weight
from ..version import __version__
from .config import METHOD, Config, QuantizedFolderConfig

if TYPE_CHECKING:
    from ..checkpoint.header import Header
    from ..plans import Plan
    from .folder import Folder
    from .quantize_on_load import QuantizeOnLoad

__all__ = ["OLDEST", "LowbitQuantizer", "attach", "register"]

OLDEST = (5, 9)
"""The first transformers that loads a quantized folder."""


class LowbitQuantizer(HfQuantizer):
    """Loads what lowbit wrote, or quantizes a float model while it is loaded, and writes either.

    ``plan``: what was done to each layer, where this quantizer did it; None for a model that came quantized.
    """

    requires_calibration = False
    quantization_config: Config

    def __new__(cls, *args: Any, **kwargs: Any) -> LowbitQuantizer:  # copies and pickles come through here as well
        _override_methods()
        return super().__new__(cls)

    def __init__(self, quantization_config: Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.plan: Plan | None = None
        self._loading: Folder | QuantizeOnLoad | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        import transformers

        if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
            raise ImportError(
                f"transformers {transformers.__version__} cannot load weights of lowbit: "
                f"upgrade it to {'.'.join(map(str, OLDEST))} or newer, or use lowbit.load"
            )

    # ---- loading ---------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self,
        model: Any,
        device_map: Any = None,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        from ..tensor import QTensor
        from .folder import Folder
        from .quantize_on_load import QuantizeOnLoad

        QTensor._is_hf_initialized = True  # type: ignore[attr-defined] # models fill with random numbers what is not marked so
        with torch.device("cpu"):  # all that is made here without a device would be made on the meta device
            if self.pre_quantized:
                self._loading = Folder(model, checkpoint_files)
            else:
                if self.quantization_config.unread is not None:
                    raise ValueError(self.quantization_config.unread.reason)
                self._loading = QuantizeOnLoad(model, self.quantization_config.recipe, device_map, checkpoint_files)
                self.plan = self._loading.plan

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        # Names in a quantized folder are those of the model, whatever those of its float files were.
        return self.get_weight_conversions() if self.pre_quantized else weight_conversions

    def get_weight_conversions(self) -> list[Any]:
        return [] if self._loading is None else self._loading.conversions()

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """No plan of transformers for dtypes reaches the parts of a quantized weight; see :meth:`Folder.keeps_dtype`."""
        found: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return None if self._loading is not None and self._loading.keeps_dtype(converter) else found

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Adapt ``plan`` to the quantized layers, and refuse by name what cannot be shared. ``model`` is an outline."""
        from .parallel import adapt_plan, check_plan, is_shared

        if plan is model.tp_plan and is_shared(model):
            adapt_plan(model, plan)
            check_plan(model, plan, model.config.distributed_config.tp_size)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self._loading is not None and self._loading.is_quantized_here(param_name)

    def get_quantize_ops(self) -> Any:
        assert self._loading is not None
        return self._loading.conversion

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of an element, as it will be when it is quantized: what a device map is made from."""
        found = None if self._loading is None else self._loading.element_size(param_name)
        return param.element_size() if found is None else found

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from .experts import multiply_by_experts

        assert self._loading is not None
        self._loading.finish(model)
        multiply_by_experts(model)
        self.plan = getattr(self._loading, "plan", None)  # layers that no file has stay as they are
        self._loading = None
        model._weight_conversions = []  # saved under the names that the header has
        return model

    # ---- saving and the rest ---------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: Any, *args: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What :func:`lowbit.save` writes: canonical bytes, each tensor once, and the header that describes them."""
        from ..checkpoint.inventory import Inventory

        found = Inventory(model)
        model.config.quantization_config = _quantization_config(model, found.header)  # config.json is written next
        return {stored.name: stored.value().detach().cpu() for stored in found.tensors}, found.header.metadata()

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """``model.dequantize()``: a float model with the numbers that the codes stand for, in ``dtype`` or each weight's."""
        from ..dequantize import dequantize_

        dequantize_(model, dtype)
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Gradients pass through quantized layers, to adapters and to what stayed float."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _override_methods() -> None:
    from transformers.modeling_utils import PreTrainedModel

    from .methods import override
    from .resizing import resize_token_embeddings
    from .saving import save_pretrained

    wrap_offload_weight()

    def is_quantized(model: Any) -> bool:
        return isinstance(getattr(model, "hf_quantizer", None), LowbitQuantizer)

    override(PreTrainedModel, "save_pretrained", save_pretrained, is_quantized)
    override(PreTrainedModel, "resize_token_embeddings", resize_token_embeddings, is_quantized)
    for name in ("half", "float"):  # transformers refuses them for quantized models; here a cast changes no code
        override(
            PreTrainedModel, name, lambda cast, model, *args, name=name: getattr(nn.Module, name)(model, *args), is_quantized
        )


def attach(model: Any, plan: Plan | None = None, quantization_config: Mapping[str, Any] | None = None) -> None:
    """Let ``model.save_pretrained`` write ``model``, one of transformers' that was quantized outside from_pretrained, by
    ``plan``, or that comes from a folder whose config.json has ``quantization_config`` of it."""
    from .experts import multiply_by_experts
    from .ties import keep_ties

    multiply_by_experts(model)
    if plan is not None:
        config = QuantizedFolderConfig.describe(plan.recipe, _facts(model, plan))
    else:
        config = QuantizedFolderConfig.from_dict(quantization_config or {})
    model.hf_quantizer = LowbitQuantizer(config)
    model.hf_quantizer.plan = plan
    model.is_quantized, model.quantization_method = True, METHOD
    model._weight_conversions = []
    keep_ties(model)


def quantization_config_of(model: Any, header: Header, plan: Plan | None = None) -> dict[str, Any]:
    """What config.json says under ``quantization_config`` of ``model``, which has the tensors of ``header``: how it was
    quantized, as the model itself knows or by ``plan``."""
    found: dict[str, Any] = _quantization_config(model, header, plan).to_dict()
    return found


def _quantization_config(model: Any, header: Header, plan: Plan | None = None) -> QuantizedFolderConfig:
    quantizer = getattr(model, "hf_quantizer", None)
    recorded_config: Config = QuantizedFolderConfig()
    if plan is not None:
        recorded_config = QuantizedFolderConfig.describe(plan.recipe, _facts(model, plan))
    elif isinstance(quantizer, LowbitQuantizer):
        recorded_config = quantizer.quantization_config
        if not isinstance(recorded_config, QuantizedFolderConfig):  # that of a user
            recorded_config = QuantizedFolderConfig.describe(recorded_config.recipe, _facts(model, quantizer.plan))
    assert isinstance(recorded_config, QuantizedFolderConfig)
    bits = header.bits_per_weight
    facts = {**recorded_config.facts, **({} if bits is None else {"bits_per_weight": round(bits, 4)})}
    return QuantizedFolderConfig.describe(recorded_config.recipe, facts, recorded_config.unread)


def _facts(model: Any, plan: Plan | None) -> dict[str, Any]:
    """What is known of ``model`` when it is quantized, beside the recipe."""
    older = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    recorded_config = older.facts if isinstance(older, QuantizedFolderConfig) else {}
    name = str(getattr(model, "name_or_path", "") or "")
    if Path(name).exists() or name.count("/") > 1:  # where it is on this machine is no name
        name = Path(name).absolute().name
    data = None if plan is None else plan.calibration
    return {
        **({"calibration": dict(data)} if data else {}),
        "lowbit_version": __version__,
        **({"base_model": recorded_config.get("base_model", name)} if recorded_config.get("base_model", name) else {}),
    }


def register(module: ModuleType) -> None:
    """Enter lowbit in transformers' tables; ``module`` is ``transformers.quantizers.auto``."""
    if METHOD not in module.AUTO_QUANTIZER_MAPPING:
        module.register_quantization_config(METHOD)(QuantizedFolderConfig)
        module.register_quantizer(METHOD)(LowbitQuantizer)


# transformers.quantizers is imported above, and lowbit's hook on it has run while there was no quantizer here to register.
if (_auto := sys.modules.get("transformers.quantizers.auto")) is not None:
    register(_auto)
