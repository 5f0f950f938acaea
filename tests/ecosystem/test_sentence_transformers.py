"""sentence-transformers: encoders and what stands above them are quantized, encode, are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import tokenizers
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

import lowbit
from lowbit import QLinear

SCHEMES = ["int4", "int3", "nf4", "nvfp4", "mxfp4", "int8_dynamic_activation_int8_weight"]
SENTENCES = ["w1 w2 w3", "w5 w6", "w9"]
works_with = pytest.mark.works_with


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT and a tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=32, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def sentences(folder: Path, **options: Any) -> Any:
    """The encoder, a mean, and a dense layer above it."""
    first = modules.Transformer(str(folder), **options)
    torch.manual_seed(1)
    return SentenceTransformer(modules=[first, modules.Pooling(32), modules.Dense(32, 16)], device="cpu")


@works_with("sentence-transformers", "quantize_, encode, save, load")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_encoded_saved_and_loaded(scheme: str, encoder: Path, tmp_path: Path) -> None:
    model = sentences(encoder)
    plain = model.encode(SENTENCES)
    lowbit.quantize_(model, scheme)
    wanted = model.encode(SENTENCES)
    assert wanted.shape == (3, 16)
    assert not numpy.array_equal(wanted, plain)
    assert isinstance(model[2].linear, QLinear)
    model.save(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert isinstance(again[2].linear, QLinear)
    assert numpy.array_equal(again.encode(SENTENCES), wanted)
    again.save(str(tmp_path / "again"))
    assert numpy.array_equal(SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(SENTENCES), wanted)


@works_with("sentence-transformers", "quantization_config")
def test_the_encoder_is_quantized_while_it_is_loaded(encoder: Path, tmp_path: Path) -> None:
    model = sentences(encoder)
    lowbit.quantize_(model[0], "int4")
    loaded = sentences(encoder, model_kwargs={"quantization_config": lowbit.Config("int4")})
    assert numpy.array_equal(loaded.encode(SENTENCES), model.encode(SENTENCES))
    assert type(loaded[2].linear) is nn.Linear
    loaded.save(str(tmp_path))
    assert numpy.array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(SENTENCES), model.encode(SENTENCES))


@works_with("sentence-transformers", "CrossEncoder")
def test_pairs(encoder: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = CrossEncoder(str(encoder), num_labels=1, device="cpu")
    lowbit.quantize_(model.model, "int4")
    pairs = [(SENTENCES[0], SENTENCES[1]), (SENTENCES[1], SENTENCES[2])]
    wanted = model.predict(pairs)
    model.save_pretrained(str(tmp_path))
    assert numpy.array_equal(CrossEncoder(str(tmp_path), device="cpu").predict(pairs), wanted)


def test_what_is_read_as_plain_tensors_is_refused(tmp_path: Path) -> None:
    model = modules.Dense(32, 16)
    lowbit.quantize_(model, "int4")
    model.save(str(tmp_path))
    with pytest.raises(ValueError, match=r"model\.safetensors holds quantized weights, which a Dense reads as plain tensors"):
        modules.Dense.load_torch_weights(str(tmp_path))
