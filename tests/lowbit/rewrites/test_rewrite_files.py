"""Rewritten models in files: saved and loaded, from disk to disk, resumed, and shared among processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import lowbit
from lowbit import Recipe, quantize_, quantize_folder
from lowbit.evals import quantizing
from lowbit.transforms import ChannelScale
from tests.ecosystem import test_architectures as architectures
from tests.lowbit.calibration.test_ranks import under_torchrun
from tests.lowbit.checkpoint.test_streaming import IDS, float_folder, in_memory, killed, stored
from tests.lowbit.rewrites.test_reader_map import stirred
from tests.lowbit.rewrites.test_rewrites import calls_for, spiked
from tests.support.models import llama

W8A8 = "int8_dynamic_activation_int8_weight"
STATIC = "int8_static_activation_int8_weight"


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mamba"])
def test_modules_in_front_are_saved_and_loaded(name, tmp_path):
    model = spiked(stirred(architectures.build(name)))
    quantize_(model, "awq(int3)", calibration=calls_for(name))
    lowbit.save(model, tmp_path / "out")
    (call, *_) = calls_for(name)
    fresh = architectures.build(name)
    with torch.no_grad():
        y = model(**call).logits
        for again in (
            lowbit.load(tmp_path / "out"),
            lowbit.load(tmp_path / "out", model=fresh),
            type(model).from_pretrained(tmp_path / "out").eval(),
        ):
            assert torch.equal(again(**call).logits, y)
    inserted = [n for n, module in model.named_modules() if isinstance(module, ChannelScale)]
    assert bool(inserted) == (name != "gemma3")


def reported(plan: lowbit.Plan) -> list[Any]:
    return [(layer.loss, layer.notes, layer.rewrites) for layer in plan.layers]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", "awq(int3)"),
        ("gpt2", "awq(gptq(int3))"),
        ("opt", f"smoothquant({STATIC}, alpha=auto)"),
        ("qwen2_moe", f"awq(smoothquant({W8A8}))"),
        ("t5", "awq(int4)"),
        ("mamba", "awq(int4)"),
    ],
)
def test_from_disk_to_disk_the_bytes_are_the_same(name, recipe, tmp_path):
    source = float_folder(tmp_path / "in", name)
    data = calls_for(name) if name == "t5" else IDS
    expected = in_memory(source, tmp_path / "memory", recipe, data)
    plan = quantize_folder(source, tmp_path / "disk", recipe, calibration=data)
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")
    assert reported(plan) == reported(expected)


def test_a_head_from_disk_to_disk_takes_the_folded_norm_along(tmp_path):
    spiked(llama(tied=False)).save_pretrained(tmp_path / "in")
    recipe = Recipe.of({"lm_head": "int4", "*": "int3"}).rewritten("awq")
    expected = in_memory(tmp_path / "in", tmp_path / "memory", recipe, IDS)
    quantize_folder(tmp_path / "in", tmp_path / "disk", recipe, calibration=IDS)
    assert expected.quantized[-1].rewrites[0].into == "model.norm"
    assert expected.quantized[-1].rewrites[0].choice
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")


@pytest.mark.slow
def test_a_job_that_is_killed_ends_in_the_same_bytes(tmp_path):
    source = tmp_path / "in"
    spiked(stirred(architectures.build("gpt2"))).save_pretrained(source)
    torch.save(IDS, source / "ids.pt")
    recipe = "awq(gptq(int3))"
    expected = quantize_folder(source, tmp_path / "whole", recipe, calibration=lowbit.Calibration(IDS, batch_size=2))
    output = killed(recipe, source, tmp_path / "out", tmp_path / "work", [20, 45, 70, 95, 10**6])
    assert "[9, 9, 9, 9, 0]" in output[-1]
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert expected.quantized[0].rewrites


RANKS = """
import sys, torch
from torch import distributed
import lowbit
from tests.ecosystem.test_architectures import build
from tests.lowbit.rewrites.test_rewrites import calls_for, spiked, stirred
distributed.init_process_group("gloo")
parts = []
for name, recipe in (("gpt2", "awq(gptq(int3))"), ("opt", "smoothquant(int8_static_activation_int8_weight, alpha=auto)")):
    model = spiked(stirred(build(name)))
    plan = lowbit.quantize_(model, recipe, calibration=calls_for(name, 5))
    parts.append([{l.name: [str(r) for r in l.rewrites] for l in plan.layers}, {k: v for k, v in model.state_dict().items()}])
torch.save(parts, f"{sys.argv[1]}-{distributed.get_rank()}")
distributed.destroy_process_group()
"""


def without_figures(records: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: [record.rpartition(",")[0] for record in found] for name, found in records.items()}


@pytest.mark.slow
def test_several_processes_make_what_one_makes(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    for count in (1, 2):
        done = under_torchrun(count, script, tmp_path / str(count))
        assert done.returncode == 0, done.stderr
    alone, first, second = (torch.load(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    for (records, state), (one, ours), (two, theirs) in zip(alone, first, second, strict=True):
        assert one == two
        assert any(records.values())
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
        same = [
            float((tensor.codes() == ours[key].codes()).double().mean())
            for key, tensor in state.items()
            if key.endswith("weight") and isinstance(tensor, lowbit.QTensor)
        ]
        assert sum(same) / len(same) >= 0.9999
        assert without_figures(records) == without_figures(one)


def test_the_command_line(tmp_path, capsys):
    from lowbit.command import run
    from tests.support.models import exam_and_text, word_model

    source = exam_and_text(word_model(tmp_path / "in"))
    assert run(["quantize", str(source), "-r", "awq(gptq(int4_g32))", "-o", str(tmp_path / "out")]) == 2
    assert "the rewrite awq looks at data: give a text with --calibration FILE" in capsys.readouterr().err.replace("\n", " ")
    command = ["quantize", str(source), "-r", "awq(gptq(int4_g32))", "--calibration", str(source / "text.txt"), "--rows", "3"]
    assert run([*command, "-o", str(tmp_path / "out"), "--json"]) == 0
    assert '"rewrites"' in capsys.readouterr().out
    assert run(["plan", str(source), "-r", "awq(int4)"]) == 0
    assert "rewritten before: awq" in capsys.readouterr().out


def test_the_bench_times_the_search_and_the_rounder(tmp_path, capsys):
    quantizing.main(["--shapes", "8x16", "--recipes", "awq(gptq(int4, passes=1)),hqq(int4)", "--repeats", "1",
                     "--out", str(tmp_path / "out.json")])  # fmt: skip
    rewritten, plain = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rewritten["rewrite"] > 0 < rewritten["round"]
    assert "rewrite" not in plain
    assert "awq(gptq(int4, passes=1))" in capsys.readouterr().out
