"""The quantizer that diffusers calls around the loading and saving of a model.

A quantized folder is read by this library, as :func:`lowbit.load` reads one; of a float folder each weight is quantized as soon
as it is read. Which methods are called, and when, was read from diffusers 0.42.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from ..checkpoint.assembly import Assembly
from ..checkpoint.header import Entry
from ..checkpoint.inventory import Inventory, join_name
from ..checkpoint.shards import FileSet
from ..checkpoint.tensor_file import CheckpointError, TensorFile
from ..dequantize import dequantize_
from ..layers import Layer, tied_groups
from ..planning import planned
from ..plans import LayerPlan
from ..pretrained.config import METHOD, Config, QuantizedFolderConfig
from ..pretrained.methods import override
from ..pretrained.saving import save_pretrained
from ..quantized_module import QuantizedModule
from ..replacement import replace_layers

if TYPE_CHECKING:
    from ..plans import Plan

__all__ = ["LowbitDiffusersQuantizer", "attach", "register"]


class LowbitDiffusersQuantizer(DiffusersQuantizer):
    """Loads what lowbit wrote, or quantizes a float model while it is loaded, and writes either.

    ``plan``: what was done to each layer, where this quantizer did it; None for a model that came quantized.
    """

    use_keep_in_fp32_modules = True
    quantization_config: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> LowbitDiffusersQuantizer:  # copies and pickles come through here as well
        _override_methods()
        return super().__new__(cls)

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.plan: Plan | None = None
        self._files: list[Path] = []
        self._codes: set[str] = set()  # names that the model has for quantized weights
        self._dtype: torch.dtype | None = None
        self._waiting: dict[str, tuple[LayerPlan, Layer]] = {}
        self._late: list[tuple[LayerPlan, Layer]] = []
        self._saved: nn.Module | None = None

    # ---- loading ---------------------------------------------------------------------------------------------

    def update_torch_dtype(self, torch_dtype: Any) -> Any:
        self._dtype = torch_dtype
        return torch_dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        """The names that the model has for what the files hold."""
        if not self.pre_quantized:
            return loaded_keys
        files = [checkpoint_files] if isinstance(checkpoint_files, (str, Path)) else checkpoint_files or []
        self._files = [Path(file) for file in files]
        if not self._files or any(file.suffix != ".safetensors" for file in self._files):
            raise CheckpointError("a quantized model is loaded from safetensors files: save it with safe_serialization")
        with _opened(self._files) as found:
            header = found.header
        names = {path: entry.names(path) for path, entry in header.quantized.items()}
        parts = {name for each in names.values() for name in each.values()}
        self._codes = {_weight_of(path, entry) for path, entry in header.quantized.items()}
        left = [name for name in loaded_keys if name not in parts and name not in header.nonpersistent]
        return [*left, *self._codes, *header.aliases]

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, keep_in_fp32_modules: Sequence[str] = (), **kwargs: Any
    ) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map sends weights to disk while they are loaded: load the model without, and offload it then "
                "(accelerate.disk_offload, or dispatch_model with this map)"
            )
        if self.pre_quantized:
            with _opened(self._files) as found:
                assembly = Assembly(model, found, torch.device("cpu"))
                assembly.read()
                assembly.apply()
            for module in model.modules() if self._dtype is not None else ():
                if isinstance(module, QuantizedModule):
                    module.to(self._dtype)
            return
        recipe = self.quantization_config.recipe
        if self.quantization_config.unread is not None:
            raise ValueError(self.quantization_config.unread.reason)
        if recipe is None:
            raise ValueError("quantization_config says nothing of how to quantize: give lowbit.Config with a recipe")
        if recipe.rewrites:
            name = recipe.rewrites[0].name
            raise ValueError(f"{name} rewrites a model that is loaded, and this one only arrives: load it, then call quantize_")
        wide = set(keep_in_fp32_modules)
        self.plan, layers = planned(model, recipe, lambda _, name: not wide & set(name.split(".")), None)
        shared = {i for group in tied_groups(layers) for i in group}
        for i, (entry, layer) in enumerate(zip(self.plan.layers, layers, strict=True)):
            if entry.config is not None and i in shared:
                self._late.append((entry, layer))
            elif entry.config is not None:
                self._waiting[f"{entry.name}.weight"] = entry, layer

    def check_if_quantized_param(self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any) -> bool:
        return param_name in self._waiting or param_name in self._codes

    def create_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, target_device: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Quantize the layer whose float weight ``param_value`` has just been read. Codes are in their layer already."""
        if param_name in self._codes:
            return
        entry, layer = self._waiting.pop(param_name)
        layer.module._parameters["weight"] = nn.Parameter(param_value.to(target_device), requires_grad=False)
        replace_layers(model, [entry], [layer])

    @property
    def supports_parallel_loading(self) -> bool:
        return False

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._waiting:
            names = ", ".join(list(self._waiting)[:3])
            raise CheckpointError(f"{len(self._waiting)} weights that were to be quantized are missing from the files: {names}")
        if self._late:
            replace_layers(model, [entry for entry, _ in self._late], [layer for _, layer in self._late])
        self._late = []
        return model

    # ---- saving and the rest ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` is what :meth:`get_state_dict_and_metadata`, which is handed none, speaks of."""
        self._saved = model
        try:
            yield
        finally:
            self._saved = None

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What :func:`lowbit.save` writes: canonical bytes, each tensor once, and the header that describes them."""
        assert self._saved is not None
        if not safe_serialization:
            raise ValueError("a quantized model is saved as safetensors: leave safe_serialization as it is")
        found = Inventory(self._saved)
        return {stored.name: stored.value().detach().cpu() for stored in found.tensors}, found.header.metadata()

    def _dequantize(self, model: Any) -> Any:
        dequantize_(model)
        model._internal_dict = type(model._internal_dict)(
            {name: value for name, value in model._internal_dict.items() if name != "quantization_config"}
        )
        return model

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _weight_of(path: str, entry: Entry) -> str:
    """What the model calls the weight of ``entry``."""
    return path if entry.kind == "parameter" else join_name(path, "weight")


@contextlib.contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[FileSet]:
    with contextlib.ExitStack() as stack:
        files: list[TensorFile] = []
        for path in paths:
            files.append(TensorFile(path))
            stack.callback(files[-1].close)
        yield FileSet(files)


def _override_methods() -> None:
    from diffusers.models.modeling_utils import ModelMixin

    def is_quantized(model: Any) -> bool:
        return isinstance(getattr(model, "hf_quantizer", None), LowbitDiffusersQuantizer)

    def save(before: Any, model: Any, *args: Any, **options: Any) -> Any:
        with model.hf_quantizer.saving(model):
            return save_pretrained(before, model, *args, files="diffusion_pytorch_model", **options)

    def to(before: Any, model: Any, *args: Any, **options: Any) -> Any:
        model.is_quantized = False  # diffusers refuses to cast quantized models; here a cast changes no code
        try:
            return before(model, *args, **options)
        finally:
            model.is_quantized = True

    override(ModelMixin, "save_pretrained", save, is_quantized)
    override(ModelMixin, "to", to, is_quantized)


def attach(model: Any, plan: Plan | None = None) -> None:
    """Let ``model.save_pretrained`` write ``model``, one of diffusers' that was quantized outside from_pretrained."""
    recipe = None if plan is None else plan.recipe
    model.hf_quantizer = LowbitDiffusersQuantizer(QuantizedFolderConfig(recipe), pre_quantized=False)
    model.hf_quantizer.plan = plan
    model.is_quantized, model.quantization_method = True, METHOD
    model.register_to_config(quantization_config=model.hf_quantizer.quantization_config)


def register(module: ModuleType) -> None:
    """Enter lowbit in diffusers' tables; ``module`` is ``diffusers.quantizers.auto``."""
    module.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, LowbitDiffusersQuantizer)
    module.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, Config)
