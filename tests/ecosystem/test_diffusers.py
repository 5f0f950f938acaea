"""diffusers: transformers and UNets quantized by ``quantization_config=`` and ``quantize_``, saved, loaded and run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import Config, QLinear
from lowbit.pretrained import import_hooks
from tests.support.optional import from_python_311

diffusers = from_python_311("diffusers")

SCHEMES = ["int4", "int3", "nf4", "nvfp4", "mxfp4", "int8_dynamic_activation_int8_weight"]
works_with = pytest.mark.works_with


def transformer() -> Any:
    torch.manual_seed(0)
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64,
    ).eval()  # fmt: skip


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 32), layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=8, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


MODELS = {"SD3Transformer2DModel": transformer, "UNet2DConditionModel": unet}


@torch.no_grad()
def output(model: Any) -> Tensor:
    random = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, 8, 8, generator=random), torch.randn(2, 5, 32, generator=random)
    more = {"pooled_projections": torch.randn(2, 64, generator=random)} if "SD3" in type(model).__name__ else {}
    y: Tensor = model(x, encoder_hidden_states=text, timestep=torch.tensor([3, 7]), **more).sample
    return y


def quantized(name: str, what: Any) -> Any:
    model = MODELS[name]()
    lowbit.quantize_(model, what)
    return model


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("floats")
    for name, make in MODELS.items():
        make().save_pretrained(home / name)
    return home


@works_with("diffusers", "quantization_config, save_pretrained, from_pretrained")
@pytest.mark.parametrize(
    ("name", "scheme"), [*(("SD3Transformer2DModel", scheme) for scheme in SCHEMES), ("UNet2DConditionModel", "int4")]
)
def test_quantized_saved_and_loaded(name: str, scheme: str, floats: Path, tmp_path: Path) -> None:
    model, kind = quantized(name, scheme), getattr(diffusers, name)
    wanted = output(model)
    assert not torch.equal(wanted, output(MODELS[name]()))
    loaded = kind.from_pretrained(floats / name, quantization_config=Config(scheme))
    assert torch.equal(output(loaded), wanted)
    assert len(loaded.hf_quantizer.plan.quantized) == sum(isinstance(module, QLinear) for module in loaded.modules()) > 5
    for i, each in enumerate((model, loaded, copy.deepcopy(loaded))):
        each.save_pretrained(tmp_path / str(i), max_shard_size=("10GB", "20KB", "10GB")[i])
        again, reported = kind.from_pretrained(tmp_path / str(i), output_loading_info=True)
        assert torch.equal(output(again), wanted)
        assert not any(reported.values()), reported
    size = sum(path.stat().st_size for path in (tmp_path / "0").glob("*.safetensors"))
    assert size < sum(path.stat().st_size for path in (floats / name).glob("*.safetensors"))
    assert json.loads((tmp_path / "0" / "config.json").read_text())["quantization_config"]["quant_method"] == "lowbit"


def test_layers_that_stay(floats: Path) -> None:
    folder, kind = floats / "UNet2DConditionModel", diffusers.UNet2DConditionModel
    model = kind.from_pretrained(folder, quantization_config=Config("int4", modules_to_not_convert=["time_embedding"]))
    assert not isinstance(model.time_embedding.linear_1, QLinear)
    assert isinstance(model.mid_block.attentions[0].proj_in, (QLinear, torch.nn.Conv2d))
    with pytest.raises(ValueError, match="nowhere"):
        kind.from_pretrained(folder, quantization_config=Config("int4", modules_to_not_convert=["nowhere"]))
    with pytest.raises(ValueError, match="looks at data"):
        kind.from_pretrained(folder, quantization_config=Config("gptq(int4)"))
    with pytest.raises(ValueError, match="rewrites a model that is loaded"):
        kind.from_pretrained(folder, quantization_config=Config(lowbit.awq("int4")))


@works_with("diffusers", "dtypes, device maps, dequantize")
@pytest.mark.parametrize("name", MODELS)
def test_dtypes_device_maps_and_dequantizing(name: str, floats: Path, tmp_path: Path) -> None:
    model, kind = quantized(name, "int4"), getattr(diffusers, name)
    model.save_pretrained(tmp_path / "codes")
    wanted = output(model)
    half = kind.from_pretrained(tmp_path / "codes", torch_dtype=torch.bfloat16)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    for each in (half, cast, kind.from_pretrained(floats / name, quantization_config=Config("int4"), torch_dtype=torch.bfloat16)):
        assert {p.dtype for p in each.parameters()} == {torch.bfloat16}
        assert each.is_quantized
    assert all(torch.equal(p, dict(cast.named_parameters())[n]) for n, p in half.named_parameters())
    assert torch.equal(output(kind.from_pretrained(tmp_path / "codes", device_map="auto")), wanted)
    with pytest.raises(ValueError, match="load the model without, and offload it then"):
        kind.from_pretrained(tmp_path / "codes", device_map={"": "disk"}, offload_folder=str(tmp_path / "off"))
    model.dequantize()
    assert not any(isinstance(module, QLinear) for module in model.modules())
    torch.testing.assert_close(output(model), wanted)  # products of the same float32 weights
    model.save_pretrained(tmp_path / "float")
    again = kind.from_pretrained(tmp_path / "float")
    assert torch.equal(output(again), output(model))
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())


def text_to_image(folder: Path) -> Any:
    """A pipeline of tiny float parts, with a tokenizer of letters."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(0)
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8)
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=encoder, unet=unet(), scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        tokenizer=CLIPTokenizer.from_pretrained(folder, model_max_length=16), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder / "pipeline")
    return pipeline


def picture(pipeline: Any) -> Tensor:
    pipeline.set_progress_bar_config(disable=True)
    random = torch.Generator().manual_seed(0)
    images = pipeline("a cat", num_inference_steps=2, generator=random, output_type="pt", height=8, width=8).images
    return images  # type: ignore[no-any-return]


@works_with("diffusers", "PipelineQuantizationConfig, pipelines")
def test_pipelines(tmp_path: Path) -> None:
    kind = diffusers.StableDiffusionPipeline
    pipeline = text_to_image(tmp_path / "parts")
    plain = picture(pipeline)
    lowbit.quantize_(pipeline.unet, "int4")
    lowbit.quantize_(pipeline.text_encoder, "int4")
    wanted = picture(pipeline)
    assert not torch.equal(wanted, plain)
    pipeline.save_pretrained(tmp_path / "saved")
    assert torch.equal(picture(kind.from_pretrained(tmp_path / "saved")), wanted)
    both = diffusers.PipelineQuantizationConfig(
        quant_backend="lowbit", quant_kwargs={"recipe": "int4"}, components_to_quantize=["unet", "text_encoder"]
    )
    named = diffusers.PipelineQuantizationConfig(quant_mapping={"unet": Config("int4"), "text_encoder": Config("int4")})
    for how in (both, named):
        found = kind.from_pretrained(tmp_path / "parts" / "pipeline", quantization_config=how)
        assert isinstance(found.text_encoder.encoder.layers[0].mlp.fc1, QLinear)
        assert torch.equal(picture(found), wanted)


def test_either_may_be_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file imports lowbit before diffusers; here its tables are as they are before that."""
    from diffusers.quantizers import auto

    for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
        table = dict(getattr(auto, name))
        del table["lowbit"]
        monkeypatch.setattr(auto, name, table)
    import_hooks.install()
    assert auto.AUTO_QUANTIZER_MAPPING["lowbit"].__name__ == "LowbitDiffusersQuantizer"
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["lowbit"] is Config
