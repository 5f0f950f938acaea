"""transformers around quantized models: from_pretrained and save_pretrained against lowbit.load, lowbit.save and quantize_."""

from __future__ import annotations

import copy
import gc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import lowbit
from lowbit import CheckpointError, QEmbedding, QLinear, QTensor
from lowbit.pretrained import quantize_on_load, quantizer
from tests import ROOT
from tests.support import models, strategies

TOY = ROOT / "evals" / "toy" / "model"
TIED = {"*embed_tokens": "int8", "lm_head": "int8", "*": "int4_g64"}
RECIPES = ("int4", "nvfp4", "mxfp4", "int3", "int8_dynamic_activation_int8_weight", TIED, {"*.q_proj": "int5", "lm_head": None})


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Folders of float models by name."""
    folder = tmp_path_factory.mktemp("floats")
    made = {
        "tied": models.llama(),
        "untied": models.llama(tied=False),
        "bf16": models.llama(dtype=torch.bfloat16),
        "gpt2": models.gpt2(),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
    return folder


def read(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def same(a: nn.Module, b: nn.Module) -> None:
    """Two models of the same classes, bits, dtypes and ties."""
    assert [(n, type(m)) for n, m in a.named_modules()] == [(n, type(m)) for n, m in b.named_modules()]
    ours, theirs = tensors(a), tensors(b)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        its = theirs[name]
        assert (tensor.dtype, tensor.requires_grad) == (its.dtype, its.requires_grad), name
        if isinstance(tensor, QTensor):
            assert torch.equal(tensor, its), name
        else:
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), its.reshape(-1).view(torch.uint8)), name
        assert {n for n, t in ours.items() if t is tensor} == {n for n, t in theirs.items() if t is its}, name
    for module, other in zip(a.modules(), b.modules(), strict=True):
        if isinstance(module, QLinear | QEmbedding):
            assert (module.weight.dtype, module.weight.byte_layout) == (other.weight.dtype, other.weight.byte_layout)


def stored(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor in a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update({n: bytes(t.reshape(-1).view(torch.uint8).tolist()) for n, t in load_file(path).items()})
    return found


# ---- a quantized folder ----------------------------------------------------------------------------------------


@given(scheme=strategies.schemes(), embedding=strategies.schemes(), kind=st.sampled_from(("tied", "untied", "bf16", "gpt2")))
@settings(max_examples=6)
def test_from_pretrained_is_load(floats, tmp_path_factory, scheme, embedding, kind):
    model, folder = read(floats / kind), tmp_path_factory.mktemp("quantized")
    names = ("*wte", "lm_head") if kind == "gpt2" else ("*embed_tokens", "lm_head")
    lowbit.quantize_(model, {**dict.fromkeys(names, embedding), "*": scheme})
    lowbit.save(model, folder)
    found = read(folder)
    same(found, lowbit.load(folder))
    same(found, model)
    assert torch.equal(found(models.tokens()).logits, model(models.tokens()).logits)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_ways_round(floats, tmp_path, recipe):
    """What is saved by one is read by the other, byte for byte, and again from there."""
    source = read(floats / "untied" if isinstance(recipe, dict) and recipe.get("lm_head", 0) is None else floats / "tied")
    lowbit.quantize_(source, recipe)
    lowbit.save(source, tmp_path / "a")
    source.save_pretrained(tmp_path / "b")
    read(tmp_path / "a").save_pretrained(tmp_path / "c", max_shard_size="40KB")
    lowbit.load(tmp_path / "a").save_pretrained(tmp_path / "d")
    lowbit.save(read(tmp_path / "c"), tmp_path / "e", max_shard_bytes=40_000)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 1
    for name in "abcde":
        same(read(tmp_path / name), source)
        same(lowbit.load(tmp_path / name), source)
        assert stored(tmp_path / name) == stored(tmp_path / "a")
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "lowbit"


def test_tie_weights_later(floats, tmp_path):
    model = read(floats / "tied", quantization_config=lowbit.Config(TIED))
    model.save_pretrained(tmp_path)
    loaded = read(tmp_path)
    for each in (model, loaded, lowbit.load(tmp_path)):
        each.tie_weights()
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert each.get_input_embeddings().weight is each.get_output_embeddings().weight
        same(each, loaded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_dtype_reaches_floats_and_no_scale(floats, tmp_path, dtype):
    model = read(floats / "tied")
    lowbit.quantize_(model, "int4")
    lowbit.save(model, tmp_path)
    found = read(tmp_path, dtype=dtype)
    assert found.dtype == found.config.dtype == dtype
    moved = lowbit.load(tmp_path).to(dtype)
    for name, tensor in tensors(found).items():
        if "inv_freq" not in name:
            assert tensor.dtype == tensors(moved)[name].dtype, name
            assert torch.equal(tensor, tensors(moved)[name]), name
    assert {m.weight.dtype for m in found.modules() if isinstance(m, QLinear)} == {dtype}


def test_a_model_of_quantized_embeddings_knows_its_dtype_again(floats, tmp_path):
    read(floats / "tied", quantization_config=lowbit.Config(TIED)).save_pretrained(tmp_path)  # the first float is a bf16 scale
    found = read(tmp_path)
    assert found.config.dtype == torch.float32
    assert found.model.embed_tokens.weight.dtype == torch.float32
    assert found.model.norm.weight.dtype == torch.float32


PLACES = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "model.layers.1": "cpu"}


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {**PLACES, "model.layers.0": "disk"}], ids=str)
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_device_maps(floats, tmp_path, device_map):
    model = read(floats / "tied")
    lowbit.quantize_(model, TIED)
    lowbit.save(model, tmp_path)
    found = read(tmp_path, device_map=device_map, offload_folder=str(tmp_path / "offloaded"))
    ids, options = models.tokens(), {"device_map": device_map, "offload_folder": str(tmp_path / "codes")}
    assert torch.equal(found(ids).logits, model(ids).logits)
    again = read(floats / "tied", quantization_config=lowbit.Config(TIED), **options)
    assert torch.equal(again(ids).logits, model(ids).logits)
    on_disk = [n for n, p in found.named_parameters() if p.is_meta]
    assert on_disk == [n for n, p in again.named_parameters() if p.is_meta]
    if not on_disk:
        same(again, model)
    for each in (found, again):
        each.save_pretrained(tmp_path / "again")
        same(read(tmp_path / "again"), model)


# ---- quantizing while loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied", "bf16", "gpt2"])
@pytest.mark.parametrize("recipe", ["int4", "nvfp4", "int8_dynamic_activation_int8_weight"])
def test_from_pretrained_quantizes(floats, kind, recipe):
    expected = read(floats / kind)
    carried = lowbit.quantize_(expected, recipe)
    found = read(floats / kind, quantization_config=lowbit.Config(recipe))
    same(found, expected)
    assert found.hf_quantizer.plan == carried
    assert not torch_module._global_parameter_registration_hooks


def test_one_float_weight_at_a_time(floats, monkeypatch):
    held = []

    def watched(model, entries, layers, *options):
        real = [m.weight for m in model.modules() if type(m) is nn.Linear and not m.weight.is_meta]
        held.append(sum(weight.numel() for weight in real))
        apply(model, entries, layers, *options)

    apply = quantize_on_load.replace_layers
    monkeypatch.setattr(quantize_on_load, "replace_layers", watched)
    read(floats / "untied", quantization_config=lowbit.Config({"re:.*(proj|head)$": "int8"}))
    assert len(held) == 16
    assert max(held) == 172 * 64


def test_a_bias_that_no_file_has(floats, tmp_path):
    """The plan is made of an outline, and the weight that it speaks of would be random without a file."""
    config = transformers.AutoConfig.from_pretrained(floats / "untied", attention_bias=True)
    state = load_file(floats / "untied" / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    refused(
        CheckpointError,
        r"missing from the files: model\.layers\.0\.self_attn\.k_proj\.bias, .* and 6 more",
        lambda: read(tmp_path, quantization_config=lowbit.Config("int8")),
    )


def test_config_round_trip(tmp_path):
    (tmp_path / "mine.yaml").write_text("rules:\n  - {match: '*', weight: int5}\n")
    recipe = lowbit.Recipe.of({"*q_proj": "int8", "*": None})
    for what in ("int4", "w8a16", recipe, TIED, str(tmp_path / "mine.yaml"), tmp_path / "mine.yaml", lowbit.int4_weight_only()):
        config = lowbit.Config(what)
        again = lowbit.Config.from_dict(json.loads(config.to_json_string()))
        assert again.recipe == config.recipe == lowbit.Recipe.of(what)
        assert copy.deepcopy(config).to_dict() == again.to_dict() == json.loads(json.dumps(config.to_dict()))
    assert lowbit.Config.from_dict({"quant_method": "lowbit", "recipe": "int4"}).recipe == lowbit.Recipe.of("int4")
    with pytest.raises(ValueError, match="did you mean int4"):
        lowbit.Config("nt4")


RULE = {"match": "*", "weight": "uint4:g128:zint:bf16"}
UNKNOWN = {
    "rounder": {"name": "", "rules": [{**RULE, "rounder": "nowhere"}]},
    "option": {"name": "", "rules": [{**RULE, "rounder": "gptq", "options": {"newer": 1}}]},
    "rewrite": {"name": "", "rewrites": ["nowhere"], "rules": [RULE]},
    "scheme": {"name": "", "rules": [{"match": "*", "weight": "int99"}]},
    "field": {"name": "", "newer": 1, "rules": [RULE]},
    "words": "four bits",
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_folder_does_not_need_the_methods_that_made_it(kind, toy, floats, tmp_path):
    """Its tensors say what they are; the recipe stays as it is written, also when the model is saved again."""
    folder = shutil.copytree(toy, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["recipe"] = UNKNOWN[kind]
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([[1, 2, 3]])
    for name, model in (("transformers", read(folder)), ("lowbit", lowbit.load(folder))):
        assert model(ids).logits.equal(lowbit.load(toy)(ids).logits)
        model.save_pretrained(tmp_path / name)
        again = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert again["recipe"] == UNKNOWN[kind]
    with pytest.raises(ValueError, match=r"nowhere|newer|int99|four bits"):  # here nothing else says how
        read(floats / "tied", quantization_config=config["quantization_config"])


# ---- what others do with it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    transformers.AutoTokenizer.from_pretrained(TOY).save_pretrained(folder)
    read(TOY, quantization_config=lowbit.Config("int4")).save_pretrained(folder)
    return folder


def test_pipeline_and_generate(toy):
    pipe = transformers.pipeline("text-generation", model=str(toy))
    wanted = lowbit.load(toy)
    ids = pipe.tokenizer("The", return_tensors="pt")
    expected = wanted.generate(**ids, max_new_tokens=6, do_sample=False)
    (found,) = pipe("The", max_new_tokens=6, do_sample=False)
    assert found["generated_text"] == pipe.tokenizer.decode(expected[0], skip_special_tokens=True)


def test_a_model_as_any_other(toy):
    model = read(toy)
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"
    assert model.is_quantized
    copied = copy.deepcopy(model)
    same(copied, model)
    copied.to(torch.float32)
    assert copied.dtype == torch.float32
    assert copied.model.layers[0].mlp.up_proj.weight.scale.dtype == torch.bfloat16
    model.model.layers[0].mlp.up_proj(torch.randn(2, 192, dtype=torch.bfloat16, requires_grad=True)).sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_lm_eval(toy):
    from lm_eval.api.instance import Instance
    from lm_eval.models import huggingface

    requests = [
        Instance("loglikelihood", {}, (context, answer), i)
        for i, (context, answer) in enumerate([("The answer is", " A"), ("The answer is", " B"), ("One and", " two")])
    ]
    by_name = huggingface.HFLM(pretrained=str(toy), batch_size=2, device="cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(toy)
    by_model = huggingface.HFLM(pretrained=lowbit.load(toy), tokenizer=tokenizer, batch_size=2)
    assert by_name.loglikelihood(requests) == by_model.loglikelihood(requests)


# ---- errors ----------------------------------------------------------------------------------------------------


def refused(kind, pattern, call):
    with pytest.raises(kind, match=pattern) as found:
        call()
    assert "\n" not in str(found.value)
    del found
    gc.collect()
    assert not torch_module._global_parameter_registration_hooks


def test_errors_are_one_line(floats, toy, tmp_path):
    sharded = tmp_path / "sharded"
    lowbit.save(lowbit.load(toy), sharded, max_shard_bytes=400_000)
    second = next(sharded.glob("model-00002-*"))
    second.unlink()
    refused(CheckpointError, rf"{second.name}: cannot be opened", lambda: read(sharded))
    refused(
        ValueError,
        "quantized with QuantizedFolderConfig but you are passing",
        lambda: read(toy, quantization_config=lowbit.Config("int8")),
    )
    bits = BitsAndBytesConfig(load_in_8bit=True)
    refused(ValueError, "quantized with QuantizedFolderConfig but you are passing", lambda: read(toy, quantization_config=bits))
    refused(ValueError, "matches no layer", lambda: read(floats / "tied", quantization_config=lowbit.Config({"x": "int4"})))
    empty = {"quant_method": "lowbit"}
    refused(ValueError, "says nothing of how", lambda: read(floats / "tied", quantization_config=empty))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'\\"format\\":\\"uint4\\"', b'\\"format\\":\\"uint9\\"', "q_proj: no format named 'uint9'"),
        (
            b'{\\"version\\":2',
            b'{\\"version\\":7',
            "version 7 of the format; this library reads versions 1 and 2: upgrade lowbit",
        ),
    ],
)
def test_a_folder_of_another_version(toy, tmp_path, old, new, message):
    for path in toy.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes().replace(old, new))
    refused(CheckpointError, message, lambda: read(tmp_path))


def test_a_weight_that_is_no_number(floats, tmp_path):
    state = load_file(floats / "untied" / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((floats / "untied" / "config.json").read_bytes())
    config = lowbit.Config("int4")
    refused(ValueError, r"layers\.1\.mlp\.up_proj\.weight holds 1 NaN", lambda: read(tmp_path, quantization_config=config))


def test_a_transformers_that_is_too_old(toy, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.8.1")
    refused(ImportError, r"transformers 5\.8\.1 cannot load weights of lowbit: upgrade it to 5\.9", lambda: read(toy))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = set(re.findall(r'"transformers>=([\d.]+)"', pyproject))
    assert asked == {".".join(map(str, quantizer.OLDEST))}


# ---- importing -------------------------------------------------------------------------------------------------

FRESH = """
import sys, torch
{before}
known = set(sys.modules)
import lowbit
new = sorted(set(sys.modules) - known)
{after}
from transformers.quantizers import auto
left = [finder for finder in sys.meta_path if getattr(finder, 'awaited', '').startswith('transformers')]
assert auto.AUTO_QUANTIZER_MAPPING["lowbit"].__name__ == "LowbitQuantizer" and not left, left
assert type(auto.__spec__.loader).__name__ == "SourceFileLoader" and "exec_module" not in vars(auto.__spec__.loader)
import importlib; importlib.reload(lowbit)
print(*new)
"""
OWN = [
    *("lowbit", "lowbit.autocast", "lowbit.pickling", "lowbit.pretrained", "lowbit.pretrained.import_hooks", "lowbit.version"),
    *("lowbit_kernels", "lowbit_kernels.rules", "lowbit_kernels.schemas"),
]


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ("", "assert 'transformers' not in sys.modules", []),
        ("", "import importlib.util; importlib.util.find_spec('transformers.quantizers.auto')", []),
        ("import transformers", "", []),
        (
            "import transformers.quantizers.auto",  # which imports accelerate
            "",
            [
                "lowbit.placement",
                "lowbit.placement.disk",
                "lowbit.placement.wrapping",
                "lowbit.pretrained.config",
                "lowbit.pretrained.quantizer",
            ],
        ),
    ],
    ids=["first", "looked for", "after transformers", "after its quantizers"],
)
def test_either_may_be_imported_first(before, after, more):
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(before=before, after=after)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted([*OWN, *more])
