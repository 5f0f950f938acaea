"""From folder to folder: the bytes that quantizing in memory gives, in the memory of two blocks, whatever interrupts it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lowbit
from lowbit import Calibration, CheckpointError, quantize_, quantize_folder
from lowbit.algorithms import ROUNDERS
from lowbit.calibration.calibrator import Calibrator
from lowbit.command import run
from lowbit.planning import planned
from lowbit.streaming.budget import needs, parse_bytes, statistics_budget
from tests import ROOT
from tests.ecosystem import test_architectures as architectures
from tests.support.models import exam_and_text, llama, tokens, word_model

IDS = tokens(6, 12)
ASYMMETRIC = "gptq(int3, asymmetric=true)"


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def float_folder(folder: Path, name: str = "llama") -> Path:
    architectures.build(name).save_pretrained(folder, max_shard_size="150KB")
    return folder


def in_memory(folder: Path, output: Path, recipe: Any, calibration: Any) -> lowbit.Plan:
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = kind.from_pretrained(folder, dtype="auto").eval()
    plan = quantize_(model, recipe, calibration=calibration)
    lowbit.save(model, output)
    return plan


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", {"lm_head": "int8", "*embed_tokens": "int8", "*": "int4"}),
        ("llama", {"*q_proj": None, "*layers.0*": None, "*": "int3"}),
        ("gemma3", {"*embed_tokens": "int8", "*": "nf4"}),
        ("gpt2", {"*wte": "int8", "*": "mxfp4"}),
        ("opt", "int8_static_activation_int8_weight"),
        ("qwen2_moe", "int4"),
        ("mixtral", "int3"),
        ("t5", "int4"),
        ("bart", "int4"),
        ("t5", ASYMMETRIC),
        ("qwen2_moe", ASYMMETRIC),
        ("gpt2", {"*h.0.attn*": None, "*h.0*": "gptq(int3)", "*": ASYMMETRIC}),
    ],
)
def test_the_bytes_are_those_of_quantizing_in_memory(name, recipe, tmp_path):
    source = float_folder(tmp_path / "in", name)
    batches = [{"input_ids": part} for part in IDS.split(2)]
    if name in ("t5", "bart"):
        batches = [{**batch, "decoder_input_ids": batch["input_ids"].flip(1)} for batch in batches]
    expected = in_memory(source, tmp_path / "memory", recipe, batches)
    plan = quantize_folder(source, tmp_path / "disk", recipe, calibration=batches)
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")
    assert plan == expected
    assert [(layer.loss, layer.notes) for layer in plan.layers] == [(layer.loss, layer.notes) for layer in expected.layers]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "in", "memory"]  # nothing is left beside them


@pytest.mark.parametrize("recipe", [*(f"{name}(int3)" for name in ROUNDERS if name != "rtn"), f"awq({ASYMMETRIC})"])
def test_every_rounder_gives_the_bytes_of_quantizing_in_memory(recipe, tmp_path):
    source = float_folder(tmp_path / "in")
    in_memory(source, tmp_path / "memory", recipe, IDS)
    quantize_folder(source, tmp_path / "disk", recipe, calibration=IDS)
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")


def test_a_text_and_the_tokenizer_of_the_folder(tmp_path):
    source = exam_and_text(word_model(tmp_path / "in"))
    calibration = Calibration(source / "text.txt", rows=3, length=16)
    quantize_folder(source, tmp_path / "out", "int4_g32", calibration=calibration)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("w1 w2")["input_ids"] == [2, 3]
    in_memory(source, tmp_path / "memory", "int4_g32", calibration)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "memory" / "model.safetensors").read_bytes()


def test_the_command_line(tmp_path, capsys):
    source = exam_and_text(word_model(tmp_path / "in"))
    command = ["quantize", str(source), "-r", "int4_g32", "--calibration", str(source / "text.txt"), "--rows", "3"]
    for name, further in {"memory": [], "limited": ["--max-memory", "1GB"], "on": ["--resume", str(tmp_path / "work")]}.items():
        assert run([*command, "-o", str(tmp_path / name), *further]) == 0, capsys.readouterr().err
    assert stored(tmp_path / "limited") == stored(tmp_path / "on")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "on" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()
    assert not (tmp_path / "work").exists()
    assert run(["quantize", str(source), "-o", str(tmp_path / "out"), "--max-memory", "1GB"]) == 2
    assert "take a model in a folder, and --calibration FILE" in capsys.readouterr().err
    assert run([*command, "-o", str(tmp_path / "out"), "--max-memory", "1KB"]) == 1
    assert "max_memory is 0.0 MB, and the job takes about" in capsys.readouterr().err


# Runs a job in a process that dies at the Nth file that it opens, renames or removes, once for each N given; then to its end.
KILLED = """
import os, sys, warnings
warnings.simplefilter("ignore")  # a process with threads forks
import torch
import lowbit
torch.set_num_threads(1)
recipe, source, output, resume, *moments = sys.argv[1:]
ids = torch.load(os.path.join(source, "ids.pt"))

def job():
    lowbit.quantize_folder(source, output, recipe, calibration=lowbit.Calibration(ids, batch_size=2), resume=resume)

def attempt(moment):
    child = os.fork()
    if child == 0:
        left = [moment]
        def heard(event, args):
            mine = event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and any(
                str(a).startswith((output, resume)) for a in args[:1])
            if mine:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
        sys.addaudithook(heard)
        job()
        print("events", moment - left[0], flush=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([attempt(int(moment)) for moment in moments])
"""


def killed(recipe: str, source: Path, output: Path, resume: Path, moments: list[int]) -> list[str]:
    command = [sys.executable, "-c", KILLED, recipe, *map(str, (source, output, resume, *moments))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.sampled(count=1)
@pytest.mark.parametrize("recipe", ["int3", "gptq(int3)", ASYMMETRIC])
def test_a_job_that_is_killed_ten_times_ends_in_the_same_bytes(recipe, tmp_path):
    source = float_folder(tmp_path / "in")
    torch.save(IDS, source / "ids.pt")
    said, codes = killed(recipe, source, tmp_path / "whole", tmp_path / "work", [1 << 30])
    assert codes == "[0]"
    events = int(said.split()[1])
    assert events > 60
    assert not (tmp_path / "work").exists()
    draw = random.Random(0)
    # Five attempts that go further and further, and five that die anywhere.
    moments = sorted(draw.randint(1, events) for _ in range(5)) + [draw.randint(1, events // 2) for _ in range(5)]
    *_, codes = killed(recipe, source, tmp_path / "output", tmp_path / "work", [*moments, 1 << 30])
    assert codes.count("9") >= 5, codes  # the others came to the end before their moment
    assert stored(tmp_path / "output") == stored(tmp_path / "whole")
    assert not (tmp_path / "work").exists()


def test_a_resume_folder_is_of_one_job(tmp_path, monkeypatch):
    source = float_folder(tmp_path / "in")

    def stopped(layer: Any, done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, tmp_path / "out", "int4", calibration=IDS, resume=tmp_path / "work", progress=stopped)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="holds a job of another data: give the same again"):
        quantize_folder(source, tmp_path / "out", "int4", calibration=IDS[1:], resume=tmp_path / "work")
    with pytest.raises(ValueError, match="holds a job of another recipe"):
        quantize_folder(source, tmp_path / "out", "int3", calibration=IDS, resume=tmp_path / "work")
    with pytest.raises(ValueError, match="holds files that are no job"):
        quantize_folder(source, tmp_path / "out", "int3", calibration=IDS, resume=source)
    reported: list[str] = []
    plan = quantize_folder(
        source, tmp_path / "out", "int4", calibration=IDS, resume=tmp_path / "work",
        progress=lambda layer, done, total: reported.append(f"{layer.name} {done}/{total}"),
    )  # fmt: skip
    assert reported[0] == "model.layers.0.self_attn.q_proj 1/14"
    assert all(layer.loss is not None for layer in plan.quantized)
    in_memory(source, tmp_path / "memory", "int4", IDS)
    assert stored(tmp_path / "out") == stored(tmp_path / "memory")


def test_what_a_kill_left_half_written_is_written_anew(tmp_path):
    source = float_folder(tmp_path / "in", "mixtral")
    in_memory(source, tmp_path / "memory", "int4", IDS)

    def stopped(layer: Any, done: int, total: int) -> None:
        raise KeyboardInterrupt

    work = tmp_path / "work"
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, tmp_path / "out", "int4", calibration=IDS, resume=work, progress=stopped)
    (work / "weights").rename(work / "weights.part")  # as if it had been killed while experts were joined
    (work / "blocks" / "model.layers.0.safetensors.part").write_bytes(b"half")
    quantize_folder(source, tmp_path / "out", "int4", calibration=IDS, resume=work)
    assert stored(tmp_path / "out") == stored(tmp_path / "memory")


MEMORY = """
import json, sys, tempfile
import torch, lowbit
from tests.support.models import llama
torch.set_num_threads(1)
source, output, recipe = sys.argv[1:]

def job(source, output):
    ids = torch.randint(3, 96, (4, 64), generator=torch.Generator().manual_seed(0))
    lowbit.quantize_folder(source, output, recipe, calibration=lowbit.Calibration(ids, batch_size=1))

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

with tempfile.TemporaryDirectory() as folder:  # what libraries take for themselves
    llama(dtype=torch.bfloat16).save_pretrained(folder + "/in")
    job(folder + "/in", folder + "/out")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
job(source, output)
print(peak() - before)
"""


_ROUNDERS = {"gptq": [1, -1], "hqq": [5], "clip": [9]}  # in which blocks


@pytest.mark.slow
@pytest.mark.parametrize("rewrites", [[], [{"awq": {"grid": 2}}]], ids=["rounders", "awq"])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is read from Linux")
def test_memory_stays_under_twice_the_largest_block_with_its_statistics(rewrites, tmp_path):
    d, ff = 1024, 2816  # so that what does not grow with the model is little beside it
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=d, intermediate_size=ff, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    by = {} if rewrites else _ROUNDERS
    rules = [{"match": "*", "weight": "int3", "rounder": name, "blocks": at, "optional": True} for name, at in by.items()]
    recipe = {"rewrites": rewrites, "rules": [*rules, {"match": "*", "weight": "int3"}]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in ("in", "out", "recipe.json"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights, statistics = 2 * (4 * d * d + 3 * d * ff), 8 * (3 * d * d + ff * ff)
    assert int(done.stdout) <= 2 * (weights + statistics)


def test_max_memory_is_compared_before_any_work(tmp_path):
    source = float_folder(tmp_path / "in")
    with pytest.raises(ValueError, match=r"max_memory is 0\.1 MB, and the job takes about .* \(weights .*, statistics .*\)"):
        quantize_folder(source, tmp_path / "out", "int4", calibration=IDS, max_memory="0.1MB")
    assert not (tmp_path / "out").exists()
    quantize_folder(source, tmp_path / "out", "int4", calibration=IDS, max_memory=10**9)


@pytest.mark.parametrize("recipe", ["gptq(int3)", {"lm_head": "int8", "*q_proj": "clip(int4)", "*": "hqq(int4)"}])
@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "gpt2"])
def test_little_memory_takes_several_runs_and_gives_the_same_bytes(name, recipe, tmp_path, monkeypatch):
    if name == "gpt2" and isinstance(recipe, dict):
        recipe = {"*c_attn": "clip(int4)", "*": "hqq(int4)"}
    source = float_folder(tmp_path / "in", name)
    runs: list[int] = []
    collected = Calibrator._collected

    def counted(self: Calibrator, *arguments: Any, **options: Any) -> Any:
        found = collected(self, *arguments, **options)
        runs.append(sum(found.has_data(name) for name in found._modules))
        return found

    monkeypatch.setattr(Calibrator, "_collected", counted)
    expected = in_memory(source, tmp_path / "memory", recipe, IDS)
    whole, runs[:] = list(runs), []
    monkeypatch.setattr("lowbit.streaming.job.statistics_budget", lambda *arguments, **options: 1)
    plan = quantize_folder(source, tmp_path / "disk", recipe, calibration=IDS)
    assert len(runs) > len(whole)
    assert sum(runs) == sum(whole)
    assert max(runs) == 1
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")
    assert plan == expected
    assert [(layer.loss, layer.notes) for layer in plan.layers] == [(layer.loss, layer.notes) for layer in expected.layers]


def test_float_inputs_that_are_gone_cannot_be_made_again(tmp_path):
    """Finished blocks hold no float weights; without a float model beside them they give what they gave before."""
    source, work = float_folder(tmp_path / "in"), tmp_path / "work"

    class Stop(Exception):  # noqa: N818 - no error
        pass

    def stop(entry: Any, done: int, total: int) -> None:
        if done == 8:  # the second block has begun
            raise Stop

    for recipe in ("gptq(int3)", ASYMMETRIC):
        with pytest.raises(Stop):
            quantize_folder(source, tmp_path / recipe, recipe, calibration=IDS, resume=work, progress=stop)
        for folder in work.glob("inputs-*"):
            shutil.rmtree(folder)
        if recipe == ASYMMETRIC:
            with pytest.raises(ValueError, match=r"layers\.0 is finished, and what it gave is not there any more"):
                quantize_folder(source, tmp_path / recipe, recipe, calibration=IDS, resume=work)
        else:
            quantize_folder(source, tmp_path / recipe, recipe, calibration=IDS, resume=work)
            in_memory(source, tmp_path / "memory", recipe, IDS)
            assert stored(tmp_path / recipe) == stored(tmp_path / "memory")


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_little_memory_gives_the_same_bytes_beside_the_float_model(name, tmp_path, monkeypatch):
    source = float_folder(tmp_path / "in", name)
    in_memory(source, tmp_path / "memory", ASYMMETRIC, IDS)
    monkeypatch.setattr("lowbit.streaming.job.statistics_budget", lambda *arguments, **options: 1)
    quantize_folder(source, tmp_path / "disk", ASYMMETRIC, calibration=IDS)
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")


def test_max_memory_says_how_many_matrices_there_is_room_for(tmp_path):
    source = float_folder(tmp_path / "in")
    model = architectures.build("llama")
    plan, layers = planned(model, lowbit.Recipe.of("gptq(int3)"), None, torch.device("cpu"), has_data=True)
    batches = Calibration.of(IDS).batches(model)
    found = needs(layers, plan, batches)
    assert len(found) == 2
    most = max(found, key=lambda need: need.fixed)
    for at_once, least in ((False, max(most.matrices)), (True, sum(most.matrices))):
        with pytest.raises(ValueError, match="allow more, or smaller batches"):
            statistics_budget(most.fixed + least - 1, layers, plan, batches, at_once)
        room = statistics_budget(most.fixed + least, layers, plan, batches, at_once)
        assert room == (None if at_once else least)
    assert statistics_budget(None, layers, plan, batches, False) is None
    quantize_folder(source, tmp_path / "one", "gptq(int3)", calibration=IDS, max_memory=most.fixed + max(most.matrices))
    quantize_folder(source, tmp_path / "all", "gptq(int3)", calibration=IDS)
    assert stored(tmp_path / "one") == stored(tmp_path / "all")
    with pytest.raises(ValueError, match="max_memory is"):
        quantize_folder(source, tmp_path / "out", "awq(gptq(int3))", calibration=IDS, max_memory=most.fixed + max(most.matrices))


@pytest.mark.parametrize(("text", "size"), [("8GB", 8 * 10**9), ("1.5 GiB", 3 * 2**29), (7, 7), ("512kb", 512_000)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8 giga", "-1", True, "GB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="max_memory is a number of bytes or a text such as '8GB', got"):
        parse_bytes(text)


def test_folders_that_will_not_do(tmp_path):
    source = float_folder(tmp_path / "in")
    with pytest.raises(ValueError, match="is the model itself"):
        quantize_folder(source, source, "int4", calibration=IDS)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        quantize_folder(tmp_path / "nowhere", tmp_path / "out", "int4", calibration=IDS)
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        quantize_folder(source, tmp_path / "out", "int4", calibration=IDS)
    llama().save_pretrained(source)
    index = source / "model.safetensors"
    renamed = {name.replace("up_proj", "lift"): t for name, t in _tensors(index).items()}
    _write(index, renamed)
    with pytest.raises(
        CheckpointError, match=r"missing from the files: model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1\."
    ):
        quantize_folder(source, tmp_path / "out", "int4", calibration=IDS)


@pytest.mark.parametrize("held", ["the embedding", "the head", "both alike", "both different"])
def test_tied_weights_by_any_of_their_names(held, tmp_path):
    source = tmp_path / "in"
    llama().save_pretrained(source)
    tensors = _tensors(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    if held != "the embedding":
        tensors["lm_head.weight"] = embedding * 2 if held == "both different" else embedding.clone()
    if held == "the head":
        del tensors["model.embed_tokens.weight"]
    _write(source / "model.safetensors", tensors)
    recipe = {"*embed_tokens": "int8", "lm_head": "int8", "*": "int4"}
    in_memory(source, tmp_path / "memory", recipe, IDS)
    quantize_folder(source, tmp_path / "disk", recipe, calibration=IDS)
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")
    model = lowbit.load(tmp_path / "disk")
    assert torch.equal(model.lm_head.weight.dequantize(), model.model.embed_tokens.weight.dequantize()) == (
        held != "both different"
    )


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
