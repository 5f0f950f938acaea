"""Experts in one parameter, rounded with statistics of the tokens that reached each: as linear layers that saw these tokens."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from lowbit import QTensor, quantize_
from lowbit.algorithms import ROUNDERS
from lowbit.calibration.collection import Collector, expert_key
from lowbit.calibration.data import Batch
from lowbit.calibration.expert_inputs import Experts
from lowbit.calibration.padding import Padding
from lowbit.calibration.ranks import Ranks
from lowbit.expert_rounding import round_experts
from lowbit.layer_config import LayerConfig
from lowbit.recipe import Recipe
from lowbit.statistics import Statistics
from lowbit.streaming import job
from tests import ROOT
from tests.lowbit.test_experts import IMPLEMENTATIONS, MODELS, build, experts_of


def one_block(name: str) -> Any:
    """In float64, so that the order of sums shows in no code; transformers' grouped_mm does not take it."""
    model = build(name, torch.float64, num_hidden_layers=1, **({"first_k_dense_replace": 0} if name == "deepseek_v3" else {}))
    if name != "llama4":
        model.set_experts_implementation("eager")
    return model


def token_ids(rows: int = 10) -> Tensor:
    return torch.randint(3, 96, (rows, 60), generator=torch.Generator().manual_seed(6))


def read_by_experts(model: Any, ids: Tensor) -> dict[str, list[Tensor]]:
    """What each expert of the first block reads, worked out from what its module is called with: by parameter."""
    (name, module), *_ = [(n, m) for n, m in model.named_modules() if n.endswith("experts")]
    calls: list[tuple[Tensor, ...]] = []
    handle = module.register_forward_pre_hook(lambda m, args: calls.append(args))
    with torch.no_grad():
        for row in ids:
            model(input_ids=row[None])
    handle.remove()
    count = module.gate_up_proj.shape[0]
    reads: dict[str, list[list[Tensor]]] = {"gate_up_proj": [[] for _ in range(count)], "down_proj": [[] for _ in range(count)]}
    transposed = getattr(module, "is_transposed", True)
    for x, *routing in calls:
        for e in range(count):
            if routing:
                tokens = x[(routing[0] == e).any(-1)]
            else:  # Llama 4: all tokens for each expert, zeros for those that chose another
                tokens = x.view(count, -1, x.shape[-1])[e]
                tokens = tokens[tokens.abs().sum(-1) > 0]
            w = module.gate_up_proj[e].t() if transposed else module.gate_up_proj[e]
            y = F.linear(tokens, w, module.gate_up_proj_bias[e] if hasattr(module, "gate_up_proj_bias") else None)
            if hasattr(module, "_apply_gate"):
                y = module._apply_gate(y)
            else:
                gate, up = y.chunk(2, -1)
                y = up * module.act_fn(gate)
            reads["gate_up_proj"][e].append(tokens)
            reads["down_proj"][e].append(y)
    return {f"{name}.{leaf}": [torch.cat(each) for each in found] for leaf, found in reads.items()}


def matrices(model: nn.Module, name: str, transposed: bool) -> Tensor:
    weight = model.get_parameter(name)
    return weight.transpose(1, 2) if transposed else weight


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, "gptq(int4, passes=1)") for name in MODELS),
        *product(("mixtral", "gpt_oss", "llama4"), ("clip(int3)", "gptq(nvfp4, passes=0)")),
    ],
)
def test_experts_are_rounded_as_linear_layers_that_read_their_tokens(name: str, recipe: str) -> None:
    model, ids = one_block(name), token_ids()
    expected, config = read_by_experts(model, ids), Recipe.parse(recipe).rules[0].config
    assert config is not None
    rounder = ROUNDERS[config.rounder]
    transposed = name in ("gpt_oss", "llama4")
    expected = {n: [tokens.detach() for tokens in reads] for n, reads in expected.items()}
    floats = {n: matrices(model, n, transposed).detach().clone() for n in expected}
    plan = quantize_(model, recipe, calibration=ids)
    entries = {layer.name: layer for layer in plan.quantized}
    for n, reads in expected.items():
        got = matrices(model, n, transposed)
        assert isinstance(got, QTensor)
        least = math.ceil(rounder.rows_per_channel * got.shape[-1])
        noise = signal = 0.0
        for e, tokens in enumerate(reads):
            statistics = Statistics.of(tokens) if len(tokens) else None
            if statistics is not None and len(tokens) >= least:
                codes, scales, _ = rounder.round(floats[n][e], config.weight, statistics, **dict(config.options))
                want = QTensor.from_codes(codes, scales, config.weight, torch.float64)
            elif rounder.needs_statistics:
                want = QTensor.quantize(floats[n][e], config.weight, method="mse")
            else:
                codes, scales, _ = rounder.round(floats[n][e], config.weight, None, **dict(config.options))
                want = QTensor.from_codes(codes, scales, config.weight, torch.float64)
            assert torch.equal(got[e].dequantize(), want.dequantize()), (n, e)
            noise += float((tokens @ (want.dequantize() - floats[n][e]).t()).square().sum())
            signal += float((tokens @ floats[n][e].t()).square().sum())
        loss = entries[n].loss
        assert loss is not None
        assert loss == pytest.approx(noise / signal, rel=2**-20)  # of products in float32, over K of them
        few = [e for e, tokens in enumerate(reads) if len(tokens) < least]
        assert bool(few) == any("tokens" in note or "no calibration data" in note for note in entries[n].notes)


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name not in ("eager", "grouped_mm")])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_statistics_are_the_same_whatever_multiplies(name: str, implementation: str) -> None:
    want, got, ids = one_block(name), one_block(name), token_ids()
    quantize_(want, "gptq(int4)", calibration=ids)
    if implementation == "lowbit":
        quantize_(copy.deepcopy(got), "int8")  # which registers it
    got.set_experts_implementation(implementation)
    quantize_(got, "gptq(int4)", calibration=ids)
    assert experts_of(want).keys() == experts_of(got).keys()
    for n, p in experts_of(want).items():
        assert torch.equal(p, experts_of(got)[n]), n


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_grouped_mm_is_heard_too(name: str) -> None:
    """It takes float32: sums of n products of which each is rounded, and their sum n times, in either order."""
    found: dict[str, list[Statistics]] = {}
    for implementation in ("eager", "grouped_mm"):
        model = build(name, num_hidden_layers=1)
        model.set_experts_implementation(implementation)
        experts = model.model.layers[0].mlp.experts
        transposed = bool(experts.is_transposed)
        collector = Collector({}, Padding(model), experts={"it": Experts(experts, "gate_up_proj", transposed)})
        ids = token_ids(4)
        with torch.no_grad(), collector.observing(0, Batch((), {"input_ids": ids})):
            model(input_ids=ids)
        collector.finish()
        assert collector.all_reduce(Ranks(), False, None)
        heard = [collector.statistics(expert_key("it", e)) for e in range(8)]
        found[implementation] = [each for each in heard if each is not None]
    assert [each.count for each in found["eager"]] == [each.count for each in found["grouped_mm"]]
    assert sum(each.count for each in found["eager"]) == 2 * 4 * 60
    for one, other in zip(found["eager"], found["grouped_mm"], strict=True):
        assert torch.equal(one.absmax, other.absmax)
        bound = 2 * (one.count + 1) * 2**-24 * one.absmax[:, None] * one.absmax
        assert bool(((one.gram - other.gram).abs() <= bound).all())


@pytest.mark.parametrize("recipe", ["gptq(int4)", "awq(gptq(int4))", "gptq(int4, asymmetric=true)"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
def test_gptq_takes_experts_with_every_rewrite_and_errs_less_than_rounding_to_nearest(name: str, recipe: str) -> None:
    ids = token_ids(20)
    by_data, nearest = build(name), build(name)
    plan = quantize_(by_data, recipe, calibration=ids)
    plain = {layer.name: layer.loss for layer in quantize_(nearest, "int4", calibration=ids).quantized if layer.kind == "experts"}
    experts = [layer for layer in plan.quantized if layer.kind == "experts"]
    assert {layer.config.rounder for layer in experts if layer.config is not None} == {"gptq"}
    assert experts
    for layer in experts:
        assert layer.loss is not None
        assert plain[layer.name] is not None
        if ".0." in layer.name:  # later blocks of the two read other numbers
            assert layer.loss < plain[layer.name]  # type: ignore[operator]


def test_experts_that_few_or_no_tokens_reached_are_named_and_rounded_without() -> None:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(4, 16, 32, generator=generator)
    x = torch.randn(200, 32, generator=generator)
    statistics = [Statistics.of(x), Statistics.of(x[:63]), None, Statistics.of(x[:64])]
    config = LayerConfig(lowbit.Scheme.parse("int4"), rounder="gptq")
    rounded = round_experts(w, config, statistics, calibrated=True)
    assert rounded.notes[:2] == (
        "no calibration data reached expert 2 of 4: rounded to nearest, scales=mse",
        "fewer than 64 tokens (2 for each of 32 channels) reached expert 1 of 4, 63 the fewest: rounded to nearest, scales=mse",
    )
    nearest = QTensor.quantize(w, "int4", method="mse")
    same = [torch.equal(rounded.weight[e], nearest[e]) for e in range(4)]
    assert same == [False, True, True, False]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_memory_is_bounded_expert_by_expert_and_the_bytes_are_the_same(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Where one Gram matrix fits at a time, the block runs again for each expert."""
    build(name).save_pretrained(tmp_path / "float")
    ids, most = token_ids(4), []
    finish = Collector.finish

    def finished(self: Collector) -> None:
        finish(self)
        most.append(len(self._tallies))

    monkeypatch.setattr(Collector, "finish", finished)
    lowbit.quantize_folder(tmp_path / "float", tmp_path / "free", "gptq(int4)", calibration=ids)
    assert max(most) > 8
    most.clear()
    monkeypatch.setattr(job, "statistics_budget", lambda *args, **kwargs: 1)
    lowbit.quantize_folder(tmp_path / "float", tmp_path / "bounded", "gptq(int4)", calibration=ids)
    assert max(most) == 1
    free, bounded = lowbit.load(tmp_path / "free"), lowbit.load(tmp_path / "bounded")
    for n, p in free.named_parameters():
        assert torch.equal(p, bounded.get_parameter(n)), n


def test_processes_share_experts_and_make_what_one_makes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, lowbit\n"
        "from tests.lowbit.test_expert_calibration import one_block, token_ids\n"
        "if len(sys.argv) > 2:\n"
        "    torch.distributed.init_process_group('gloo')\n"
        "model = one_block('mixtral')\n"
        "plan = lowbit.quantize_(model, 'gptq(int4, passes=1)', calibration=token_ids())\n"
        "if len(sys.argv) < 3 or torch.distributed.get_rank() == 0:\n"
        "    notes = [(layer.name, layer.notes) for layer in plan.quantized]\n"
        "    torch.save(({n: p.dequantize() for n, p in model.named_parameters() if p.dim() == 3}, notes), sys.argv[1])\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in ([script, tmp_path / "one"], [*several, script, tmp_path / "two", "group"]):
        done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (one, notes), (two, others) = (torch.load(tmp_path / name) for name in ("one", "two"))
    assert notes == others
    for n, dense in one.items():
        assert torch.equal(dense, two[n]), n
