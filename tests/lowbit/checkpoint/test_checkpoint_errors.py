"""A file that is cut short, altered or hostile gives one CheckpointError that names it, and nothing else escapes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit
from lowbit import FORMATS, CheckpointError, Format, QEmbedding, QLinear, QTensor, Scheme, Table
from tests.support import strategies  # noqa: F401 - its hypothesis profile

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def float_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 40), nn.Linear(40, 4), nn.Linear(4, 2, bias=False), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([True, False]))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = float_model()
    model[0] = QEmbedding(QTensor.quantize(torch.linspace(-1, 1, 120).reshape(3, 40), "int4_g32"))
    weight = QTensor.quantize(model[1].weight, "nvfp4")
    model[1] = QLinear(weight, model[1].bias, Scheme("int8", scale="fp32"), torch.tensor(0.5))
    lowbit.save(model, folder)
    lowbit.save(model, folder / "sharded", max_shard_bytes=100)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    shutil.copy(saved / FILE, tmp_path / FILE)
    return tmp_path


@pytest.fixture
def sharded(saved, tmp_path) -> Path:
    return shutil.copytree(saved / "sharded", tmp_path / "sharded")


def split(raw: bytes) -> tuple[dict, bytes]:
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def join(header: dict | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def change(path: Path, edit) -> None:
    """Let ``edit(entries, header)`` alter what a file says of its tensors, and its lowbit header."""
    entries, data = split(path.read_bytes())
    text = entries["__metadata__"]["lowbit"]
    header = json.loads(text)
    edit(entries, header)
    if entries.get("__metadata__", {}).get("lowbit") == text:
        entries["__metadata__"]["lowbit"] = json.dumps(header)
    path.write_bytes(join(entries, data))


def refused(folder: Path, message: str, file: str = FILE) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        lowbit.load(folder, model=float_model())
    assert file in str(caught.value)


def test_what_the_fixture_holds_can_be_loaded(folder, sharded):
    change(folder / FILE, lambda entries, header: None)
    lowbit.load(folder, model=float_model())
    lowbit.load(sharded, model=float_model())


# ---- the safetensors header --------------------------------------------------------------------------------------


def test_every_truncation_is_refused(folder):
    raw = (folder / FILE).read_bytes()
    for length in [*range(64), *range(64, len(raw), 97), len(raw) - 1]:
        (folder / FILE).write_bytes(raw[:length])
        refused(folder, "cut short|ends within")
    (folder / FILE).write_bytes(raw + b"\0")
    refused(folder, "the header describes .* bytes of tensors, and the file holds")


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_header_of_a_wrong_length(folder, length):
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(length.to_bytes(8, "little") + raw[8:])
    refused(folder, "claims a header of|is no JSON")


TEXTS = {
    "no JSON": "{'a': 1}",
    "not UTF-8": b"\xff\xfe{}".decode("latin1"),
    "a list": "[]",
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "NaN": '{"a": NaN}',
    "a long number": '{"a": ' + "9" * 10_000 + "}",
    "twice": '{"a": 1, "a": 2}',
    "metadata": '{"__metadata__": []}',
    "metadata of numbers": '{"__metadata__": {"lowbit": 1}}',
    "nothing": "{}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_header_that_is_no_header(folder, text):
    (folder / FILE).write_bytes(join(text, b""))
    refused(folder, r"JSON|__metadata__|has no 'lowbit'")


HUGE = 1 << 62
ENTRIES = {
    "negative offsets": {"data_offsets": [-60, 0]},
    "backward offsets": {"data_offsets": [60, 0]},
    "offsets beyond the file": {"data_offsets": [1 << 40, (1 << 40) + 60]},
    "offsets that are no numbers": {"data_offsets": ["0", True]},
    "three offsets": {"data_offsets": [0, 1, 2]},
    "no offsets": {"data_offsets": None},
    "a negative size": {"shape": [-3, 20]},
    "a true size": {"shape": [True, 60]},
    "a fraction": {"shape": [3.0, 20]},
    "sizes that overflow": {"shape": [HUGE, HUGE, 4]},
    "sizes behind a zero": {"shape": [0, HUGE, HUGE]},
    "more than the file": {"shape": [3, 1 << 30]},
    "a wide dtype": {"dtype": "F64"},
    "no such dtype": {"dtype": "F3"},
    "a dtype that is no name": {"dtype": ["U8"]},
    "another shape": {"shape": [20, 3]},
    "another dtype": {"dtype": "I8"},
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_claims_about_a_tensor_that_do_not_hold(folder, entry):
    change(folder / FILE, lambda entries, header: entries["0.weight"].update(entry))
    refused(folder, r"0\.weight")


def test_tensors_that_overlap_or_are_not_described(folder):
    raw = (folder / FILE).read_bytes()
    change(folder / FILE, lambda entries, header: entries.update(more=entries["0.weight"]))
    refused(folder, "begins at byte .* of the data, expected")
    (folder / FILE).write_bytes(raw)
    change(folder / FILE, lambda entries, header: entries.update({"0.weight": 3}))
    refused(folder, r"0\.weight: needs dtype, shape and data_offsets")
    (folder / FILE).write_bytes(raw)
    change(folder / FILE, lambda entries, header: entries.update({"renamed": entries.pop("0.weight")}))
    refused(folder, r"missing from the file: 0\.weight")


# ---- the lowbit header -------------------------------------------------------------------------------------------


def weight(**fields):
    return lambda entries, header: header["quantized"]["0"].update(fields)


def top(**fields):
    return lambda entries, header: header.update(fields)


def table(name, **fields):
    return lambda entries, header: header["formats"][name].update(fields)


HEADERS = {
    "a newer version": (top(version=3), "version 3 of the format; this library reads versions 1 and 2: upgrade lowbit"),
    "no version": (top(version=None), "version None of the format"),
    "a true version": (top(version=True), "version True of the format"),
    "no metadata": (lambda entries, header: entries.pop("__metadata__"), "has no 'lowbit' in its metadata"),
    "deep": (lambda entries, header: entries["__metadata__"].update(lowbit="[" * 100_000), "the lowbit header"),
    "a list of weights": (top(quantized=[]), "needs an object 'quantized'"),
    "an entry that is none": (top(quantized={"0": 4}), "quantized weight 0: must be an object"),
    "a kind": (weight(kind="conv"), "quantized weight 0: kind must be one of linear, embedding, parameter, got 'conv'"),
    "another kind": (weight(kind="linear"), "0 is a quantized linear in the file and a Embedding in the model"),
    "a format without a table": (weight(format="uint5"), "the header has no table of the format 'uint5'"),
    "no such format": (weight(format="uint77"), "no format named 'uint77'"),
    "no group": (weight(group_size=0), "group_size must be -1 .* or at least 1, got 0"),
    "half a group": (weight(group_size=2.5), "group_size is missing or of the wrong type: 2.5"),
    "another group": (weight(group_size=8), r"0\.scale is bfloat16 \[3, 2\] in the file, expected bfloat16 \[3, 5\]"),
    "an activation with a zero point": (
        lambda entries, header: header["quantized"]["1"].update(activation="uint4:g32:zint:bf16"),
        "quantized weight 1: an activation scheme has no zero point",
    ),
    "a huge group": (weight(group_size=1 << 40), "larger than any memory"),
    "a zero point": (weight(zero_point="half"), "zero_point must be one of none, int, float, got 'half'"),
    "another zero point": (weight(zero_point="float"), r"0\.zero_point is uint8 \[3, 1\] in the file, expected bfloat16"),
    "another scale": (weight(scale="fp16"), r"0\.scale is bfloat16 \[3, 2\] in the file, expected float16 \[3, 2\]"),
    "a shape": (weight(shape=[3, 41]), r"0 is \[N, K\] = \[3, 41\] in the file and \[3, 40\] in the model"),
    "a negative shape": (weight(shape=[3, -40]), r"shape must be \[N, K\], got \[3, -40\]"),
    "a deep shape": (weight(shape=[[[3]], 40]), r"shape must be \[N, K\]"),
    "one size": (weight(shape=[40]), r"shape must be \[N, K\], got \[40\]"),
    "a huge shape": (weight(shape=[1 << 40, 1 << 40]), "larger than any memory"),
    "a dtype": (weight(dtype="int8"), "dtype must be one of float16, bfloat16, float32, float64, got 'int8'"),
    "a bias": (weight(bias=True), "only a linear layer has a bias"),
    "outer": (weight(outer=True), "outer=True stands above scales in a narrow format"),
    "a missing field": (lambda entries, header: header["quantized"]["0"].pop("shape"), "shape is missing or of the wrong type"),
    "an activation": (lambda entries, header: header["quantized"]["1"].update(activation="int99"), "no scheme named 'int99'"),
    "a huge group of inputs": (
        lambda entries, header: header["quantized"]["1"].update(activation=f"int8:g{1 << 40}:bf16"),
        "of the activation is larger than any memory",
    ),
    "a layer more": (lambda e, header: header["quantized"].update(x=header["quantized"]["0"]), "x is quantized in the file"),
    "a layer less": (
        lambda e, header: header["quantized"].pop("0"),
        r"0\.weight is uint8 \[3, 20, 1\] in the file, expected float32 \[3, 40\]",
    ),
    "an alias of nothing": (top(aliases={"2.weight": "gone"}), "2.weight is to share the tensor gone|stands"),
    "an alias of an alias": (top(aliases={"a": "b", "b": "a"}), "a is to share the tensor b, which no file holds"),
    "an alias too many": (top(aliases={"more": "2.weight"}), "unexpected, the model has none of that name: more"),
    "an alias that is no name": (top(aliases={"a": [1]}), "must hold names"),
    "nonpersistent": (top(nonpersistent=[4]), "must hold names"),
    "values": (table("uint4", values=[*range(15), 99]), "'uint4': .* code 15 is 99.0 there and 15.0 here"),
    "a negative zero": (table("uint4", values=[-0.0, *range(1, 16)]), "code 0 is -0.0 there and 0.0 here"),
    "fewer values": (table("uint4", values=[0, 1]), "'uint4': the file has 2 numbers of 4 bits, lowbit.FORMATS 16"),
    "bits": (table("uint4", bits=5), "'uint4': the file has 16 numbers of 5 bits"),
    "words": (table("uint4", values=["one"] * 16), "values must be numbers, 'nan', 'inf' or '-inf', got one"),
    "a value beyond floats": (table("uint4", values=[10**400] * 16), "beyond float64"),
    "no values": (table("uint4", values=None), "'uint4': needs bits and values"),
    "a table of no format": (top(formats={"x": {"bits": 1, "values": [0, 1]}}), r"'x' is not in lowbit\.FORMATS"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_says_something_else(folder, edit, message):
    change(folder / FILE, edit)
    refused(folder, message)


def test_a_tensor_is_not_shared_by_what_packs_it_otherwise(tmp_path):
    """A zero point is packed in the file and a byte in memory; a buffer is what the file holds."""
    lowbit.save(nn.Sequential(QLinear(QTensor.quantize(torch.randn(3, 40), "int4_g32"))), tmp_path)
    change(tmp_path / FILE, top(aliases={"codes": "0.zero_point"}))
    model = nn.Sequential(nn.Linear(40, 3, bias=False))
    model.register_buffer("codes", torch.zeros(3, 1, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"0\.zero_point shares the tensor 0\.zero_point with another name"):
        lowbit.load(tmp_path, model=model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("kind", ["large", "fifo"])
def test_a_configuration_that_is_none(folder, kind):
    path = folder / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(300 << 20)  # zeros that take no room on the disk
    with pytest.raises(CheckpointError, match=r"config\.json: is no file of a configuration"):
        lowbit.load(folder)


def test_formats_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "mine", Table("mine", (-2.0, -0.5, 0.5, 3.0)))
    lowbit.save(nn.Sequential(QLinear(QTensor.quantize(torch.ones(2, 8), Scheme("mine", 8)))), tmp_path)
    lowbit.load(tmp_path, model=nn.Sequential(nn.Linear(8, 2, bias=False)))
    values = (-2.0, -0.5, 0.5, 4.0)
    for change, message in (
        (Format("mine", values), "differs from that of lowbit.FORMATS"),
        (None, "is not in lowbit.FORMATS: install the plug-in that brings it, or regis"),
    ):
        monkeypatch.delitem(FORMATS, "mine")
        if change is not None:
            monkeypatch.setitem(FORMATS, "mine", change)
        with pytest.raises(CheckpointError, match=message):
            lowbit.load(tmp_path, model=nn.Sequential(nn.Linear(8, 2, bias=False)))


# ---- sets of files -------------------------------------------------------------------------------------------------


def test_folders_that_are_no_checkpoint(tmp_path):
    for folder, message in ((tmp_path, f"holds neither {FILE} nor"), (tmp_path / "gone", "is no folder")):
        with pytest.raises(CheckpointError, match=message):
            lowbit.load(folder, model=float_model())
    (tmp_path / FILE).mkdir()
    refused(tmp_path, "cannot be opened")


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    raw = shard.read_bytes()
    shard.unlink()
    refused(sharded, "cannot be opened: No such file", shard.name)
    shard.write_bytes(raw[:-1])
    refused(sharded, "cut short or altered", shard.name)
    change_raw = raw.replace(b'\\"version\\":2', b'\\"version\\":1')
    assert change_raw != raw
    shard.write_bytes(change_raw)
    refused(sharded, "its header differs from that of model-00001", shard.name)


def test_an_index_and_shards_that_disagree(sharded):
    index = json.loads((sharded / INDEX).read_text())
    places = index["weight_map"]
    shards = sorted(set(places.values()))
    moved = {**places, "0.weight": next(s for s in shards if s != places["0.weight"])}
    less = {name: home for name, home in places.items() if name != "0.weight"}
    more = {**places, "more": shards[0]}
    for bad, message in (
        (moved, r"tensor 0\.weight is"),
        (less, r"tensor 0\.weight is in the file and not in"),
        (more, "tensor more is"),
    ):
        (sharded / INDEX).write_text(json.dumps({"weight_map": bad}))
        refused(sharded, message, ".safetensors")
    first, second = (sharded / name for name in shards[:2])
    (sharded / INDEX).write_text(json.dumps({"weight_map": {n: h for n, h in places.items() if h != shards[1]}}))
    refused(sharded, "missing from the file", ".safetensors")
    assert first.exists()
    assert second.exists()


@pytest.mark.parametrize(
    "home", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0.safetensors", ".safetensors", 3, None]
)
def test_an_index_that_points_elsewhere(sharded, home):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["0.weight"] = home
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, r"tensor 0\.weight: the file must be a plain \*\.safetensors name", INDEX)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, "index|weight_map", INDEX)


# ---- anything ------------------------------------------------------------------------------------------------------


def loads_or_is_refused(folder: Path, raw: bytes) -> None:
    (folder / FILE).write_bytes(raw)
    model = float_model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = None
    try:
        loaded = lowbit.load(folder, model=model)
    except CheckpointError as error:
        said = str(error)
    if said is not None:
        assert FILE in said
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert [type(m) for m in model.modules()] == [type(m) for m in float_model().modules()]
        return
    shapes = [tuple(loaded[i].weight.shape) for i in range(4)]
    assert shapes == [(3, 40), (4, 40), (2, 4), (2,)]
    loaded[1](loaded[0](torch.tensor([0, 1, 2])).to(torch.float32))


@given(data=st.data())
@settings(max_examples=250)
def test_flipped_bytes_load_or_are_refused(saved, tmp_path_factory, data):
    raw = bytearray((saved / FILE).read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header - 1) | st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.sampled_from((raw[place] ^ 1, raw[place] ^ 0x80, 0, 0x22, 0x30, 0x39, 0x7D, 0xFF)))
    if data.draw(st.booleans()) and data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    loads_or_is_refused(tmp_path_factory.getbasetemp(), bytes(raw))


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8)
    | st.sampled_from(("linear", "uint4", "int8", "bf16", "e8m0", "2.weight", "0.packed", "U8", "BF16")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@given(data=st.data())
@settings(max_examples=250)
def test_any_json_value_in_place_of_another_loads_or_is_refused(saved, tmp_path_factory, data):
    entries, rest = split((saved / FILE).read_bytes())
    header = json.loads(entries["__metadata__"]["lowbit"])
    place: dict | list = header if data.draw(st.booleans()) else entries
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or not data.draw(st.integers(0, 4)):
            break
        place = place[key]
    if isinstance(place, dict) and not data.draw(st.integers(0, 5)):
        del place[key]
    else:
        place[key] = data.draw(odd)
    if isinstance(entries.get("__metadata__"), dict) and isinstance(entries["__metadata__"].get("lowbit"), str):
        entries["__metadata__"]["lowbit"] = json.dumps(header)
    loads_or_is_refused(tmp_path_factory.getbasetemp(), join(entries, rest))
