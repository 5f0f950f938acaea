"""transformers' pipelines and ways to generate give with codes what the same numbers give as floats; dequantize, shards."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline

import lowbit
from lowbit import QLinear
from tests.support import models

SCHEMES = ["int4", "int3", "nf4", "nvfp4", "mxfp4", "int8_dynamic_activation_int8_weight"]
works_with = pytest.mark.works_with
IDS = models.tokens(2, 6)
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "[MASK]", *(f"w{i}" for i in range(size - 4))]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"unk_token": "<pad>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


# ---- pipelines -----------------------------------------------------------------------------------------------------


def generation() -> tuple[Any, Callable[[Any], Any]]:
    def ask(model: Any) -> Any:
        words = pipeline("text-generation", model=model, tokenizer=tokenizer(96))
        return words(["w1 w2 w3", "w7"], max_new_tokens=4, do_sample=False)

    return models.llama(False), ask


def speech() -> tuple[Any, Callable[[Any], Any]]:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=134, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=1500, max_target_positions=40, decoder_start_token_id=1,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|startofprev|>", "<|notimestamps|>"]
    vocabulary = {letter: i for i, letter in enumerate([*marks, *map(chr, range(0x100, 0x180))])}
    words = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    sound = numpy.random.RandomState(0).randn(8000).astype("float32")

    def ask(model: Any) -> Any:
        recorded = pipeline(
            "automatic-speech-recognition",
            model=model,
            tokenizer=words,
            feature_extractor=transformers.WhisperFeatureExtractor(),
        )
        return recorded(sound, generate_kwargs={"max_new_tokens": 5})

    return transformers.WhisperForConditionalGeneration(config).eval(), ask


def images() -> tuple[Any, Callable[[Any], Any]]:
    from PIL import Image

    torch.manual_seed(0)
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=3)
    image = Image.fromarray(numpy.random.RandomState(0).randint(0, 255, (20, 20, 3), "uint8"))

    def ask(model: Any) -> Any:
        processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
        return pipeline("image-classification", model=model, image_processor=processor)(image)

    return transformers.ViTForImageClassification(config).eval(), ask


def masks() -> tuple[Any, Callable[[Any], Any]]:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, vocab_size=96, max_position_embeddings=32)

    def ask(model: Any) -> Any:
        return pipeline("fill-mask", model=model, tokenizer=tokenizer(96), top_k=2)("w1 w2 [MASK] w3")

    return transformers.BertForMaskedLM(config).eval(), ask


PIPELINES = {
    "text-generation": generation,
    "automatic-speech-recognition": speech,
    "image-classification": images,
    "fill-mask": masks,
}


def alike(found: Any, wanted: Any) -> None:
    """The same words and labels, and scores as near as sums of float32 are."""
    if isinstance(wanted, float):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))
    elif isinstance(wanted, (list, dict)):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            alike(found[key], wanted[key])
    else:
        assert found == wanted


@works_with("transformers", "pipelines: text, speech, images, fill-mask")
@pytest.mark.parametrize("scheme", ["int4", "int3", "nvfp4"])
@pytest.mark.parametrize("task", PIPELINES)
@pytest.mark.filterwarnings("ignore:.*(torchvision|input name `inputs`)")
def test_pipelines(task: str, scheme: str, tmp_path: Path) -> None:
    model, ask = PIPELINES[task]()
    lowbit.quantize_(model, scheme)
    found = ask(model)
    model.save_pretrained(tmp_path)
    alike(ask(type(model).from_pretrained(tmp_path)), found)
    dense = copy.deepcopy(model).dequantize()
    assert not any(isinstance(module, QLinear) for module in dense.modules())
    alike(found, ask(dense))


# ---- generating ----------------------------------------------------------------------------------------------------

HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assistant": {},
}


@works_with("transformers", "generate: beams, static cache, assistant")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ways_to_generate(scheme: str) -> None:
    model, dense, small = (models.llama(False) for _ in range(3))
    for each, what in ((model, scheme), (small, "int3")):
        lowbit.quantize_(each, what)
    if "activation" in scheme:  # a float layer does not round its input
        dense = copy.deepcopy(model)
    else:
        lowbit.quantize_(dense, scheme)
        dense.dequantize()
    for name, how in HOW.items():
        more = {"assistant_model": small} if name == "assistant" else how
        ids = IDS[:1] if name in ("assistant", "prompt lookup") else IDS
        assert torch.equal(model.generate(ids, **GREEDY, **more), dense.generate(ids, **GREEDY, **how)), name


# ---- floats, shards, heads -----------------------------------------------------------------------------------------


@works_with("transformers", "dequantize")
@pytest.mark.parametrize(("scheme", "tied"), [*((scheme, True) for scheme in SCHEMES), ("int4", False)])
def test_dequantize_gives_a_float_model(scheme: str, tied: bool, tmp_path: Path) -> None:
    model = models.llama(tied)
    lowbit.quantize_(model, {"*embed_tokens": "int4", "lm_head": "int4", "*": scheme})
    weights = {name: weight.dequantize() for name, weight in model.named_parameters() if isinstance(weight, lowbit.QTensor)}
    wanted = model(IDS).logits
    model.save_pretrained(tmp_path / "codes")
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "codes")):
        assert each.dequantize() is each
        found = dict(each.named_parameters())
        assert all(torch.equal(found[name], weight) and type(found[name]) is nn.Parameter for name, weight in weights.items())
        assert not any(vars(found[name]).keys() - {"_is_hf_initialized"} for name in weights)
        assert (each.lm_head.weight is each.model.embed_tokens.weight) == tied
        if "activation" not in scheme:
            torch.testing.assert_close(each(IDS).logits, wanted)
        each.save_pretrained(tmp_path / "float")
        assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
        assert type(again.model.layers[0].mlp.up_proj) is nn.Linear
        assert torch.equal(again(IDS).logits, each(IDS).logits)
    lowbit.quantize_(model, "int8")  # which is a float model like any other
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    half.dequantize(torch.bfloat16)
    assert half.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_what_a_rewrite_put_ahead_of_a_layer_has_no_float_layer() -> None:
    model = models.llama(False)
    lowbit.quantize_(model, "rotation(int4, online=true)")
    with pytest.raises(ValueError, match=r"down_proj multiplies its input by .* first"):
        model.dequantize()
    assert isinstance(model.model.layers[0].mlp.up_proj, QLinear)


@works_with("transformers", "save_pretrained in shards, of models in memory and loaded")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_of_the_model_at_hand(scheme: str, tmp_path: Path) -> None:
    model = models.llama()
    lowbit.quantize_(model, {"*embed_tokens": "int4", "lm_head": "int4", "*": scheme})
    wanted = model(IDS).logits
    model.save_pretrained(tmp_path / "a", max_shard_size="10KB")
    shards = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b", max_shard_size="10KB")
    assert sorted(path.name for path in (tmp_path / "b").glob("*.safetensors")) == shards
    for name in shards:
        first, second = load_file(tmp_path / "a" / name), load_file(tmp_path / "b" / name)
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    for folder in ("a", "b"):
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / folder)(IDS).logits, wanted)
        assert torch.equal(lowbit.load(tmp_path / folder)(IDS).logits, wanted)


@works_with("transformers", "another head")
def test_another_head_over_a_float_folder(tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, pad_token_id=0, quantization_config=lowbit.Config("int4")
    )
    assert isinstance(model.model.layers[0].mlp.up_proj, QLinear)
    assert type(model.score) is nn.Linear
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
