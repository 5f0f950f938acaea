"""Models compared on the same material, and evaluations that go on where they were."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import lowbit
from lowbit.command import run
from lowbit.evals import evaluation
from lowbit.evals.cache import Cache, fingerprint

# ---- comparing -------------------------------------------------------------------------------------------------------


def read(folder: Path, text: Path | None = None, **options: Any) -> evaluation.Material:
    return evaluation.Material.read(folder, text, context=32, **options)


def test_models_are_compared_on_the_same_material(
    folder: Path, loaded: tuple[nn.Module, Any], material: Path, tmp_path: Path
) -> None:
    net, tokenizer = loaded
    steps: list[str] = []
    outcomes = evaluation.compare(
        lambda: copy.deepcopy(net), tokenizer, ["int8", "int2_g32"], read(folder, material / "text.txt", compared=4), files=True,
        progress=lambda what, done, total: steps.append(what),
    )  # fmt: skip
    plain, int8, int2 = outcomes
    assert [o.recipe for o in outcomes] == ["float", "int8", "int2_g32"]
    assert plain.bits_per_weight == 32
    assert plain.differences == {}
    assert plain.divergence is None
    assert plain.kernels == {"decode": {}, "prompt": {}}
    assert int8.bits_per_weight > 8 > int2.bits_per_weight > 2
    assert plain.file_bytes > int8.file_bytes > int2.file_bytes
    assert plain.size["codes"] == plain.size["scales"] == 0
    lowbit.save(quantized(net, "int8"), tmp_path / "int8")
    assert sum(int8.size.values()) == sum(t.nbytes for t in load_file(tmp_path / "int8" / "model.safetensors").values())
    assert int8.size["codes"] > 3 * int2.size["codes"] > 0
    assert abs(int8.perplexity.loss - plain.perplexity.loss) < abs(int2.perplexity.loss - plain.perplexity.loss)
    assert 0 <= int8.divergence.kl < int2.divergence.kl
    paired = int2.differences["mmlu"]
    assert paired.n == 27
    assert paired.difference == pytest.approx(int2.tasks["mmlu"].value - plain.tasks["mmlu"].value)
    assert paired.holm >= paired.mcnemar
    assert sum(int8.kernels["decode"].values()) == sum(int8.kernels["prompt"].values()) == 7
    assert min(row["sqnr_db"] for row in int8.layers) > max(row["sqnr_db"] for row in int2.layers)
    assert "int8: perplexity" in steps
    assert int8.to_dict()["tasks"]["mmlu"]["difference"]["n"] == 27


def quantized(net: nn.Module, recipe: str) -> nn.Module:
    made = copy.deepcopy(net)
    lowbit.quantize_(made, recipe)
    return made


def test_a_text_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.txt cannot be read: No such file"):
        read(folder, tmp_path / "absent.txt")


# ---- going on --------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts the batches that a model is asked, and dies at the one that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, 10**9

    def watch(self, net: nn.Module) -> nn.Module:
        def count(*_: object) -> None:
            self.calls += 1
            if self.calls > self.last:
                raise KeyboardInterrupt

        net.register_forward_pre_hook(count)
        return net


def test_an_interrupted_evaluation_goes_on(folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path) -> None:
    net, tokenizer = loaded
    source = read(folder, batch=1)

    def measure(last: int = 10**9, recipes: tuple[str, ...] = ("int8",), of: nn.Module = net, what: Any = source, **options: Any):
        counting = Counting()
        counting.last = last
        try:
            outcomes = evaluation.compare(lambda: counting.watch(copy.deepcopy(of)), tokenizer, recipes, what, **options)
        except KeyboardInterrupt:
            outcomes = None
        return outcomes, counting.calls

    whole, all_calls = measure()
    kept = {"cache": tmp_path}
    assert measure(5, **kept)[0] is None  # in the float model's questions
    assert measure(9, **kept)[0] is None  # in the recipe's
    resumed, calls = measure(**kept)
    assert calls == all_calls - 14
    assert [o.tasks for o in resumed] == [o.tasks for o in whole]
    assert [o.differences for o in resumed] == [o.differences for o in whole]
    again, calls = measure(**kept)
    assert calls == 0
    assert [o.to_dict() for o in again] == [o.to_dict() for o in resumed]

    # Another recipe, other questions, another batch size or another model is never answered from what is there.
    assert measure(recipes=("int4",), **kept)[1] >= 7
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.lm_head.weight[3] += 2
    fresh, calls = measure(of=other, **kept)
    assert calls == all_calls
    assert [o.tasks for o in fresh] == [o.tasks for o in measure(of=other)[0]]
    assert measure(what=read(folder, batch=1, shots=1), **kept)[1] == all_calls - 2 * 2
    assert measure(what=read(folder, batch=3), **kept)[1] > 0


def test_a_calibrated_recipe_is_measured_anew_on_another_text(
    loaded: tuple[nn.Module, Any], material: Path, tmp_path: Path
) -> None:
    net, tokenizer = loaded
    text = (material / "text.txt").read_text(encoding="utf-8")
    source = evaluation.Material.read(None, material / "text.txt", tasks=(), context=32, chunks=4)
    losses = {}
    for data in (text, " ".join(text.split()[::-1]), text):
        made = lowbit.Calibration([data], length=64, tokenizer=tokenizer)
        recipes = ["int2", lowbit.Recipe.parse("gptq(int2)")]
        for cache in (tmp_path, None):
            found = evaluation.compare(lambda: copy.deepcopy(net), tokenizer, recipes, source, calibration=made, cache=cache)
            losses.setdefault((data, "cached" if cache else "fresh"), []).append([o.perplexity.value for o in found])
    first, *others = losses.values()
    assert losses[text, "cached"] == losses[text, "fresh"] == [first[0], first[0]]
    assert others[1][0][:2] == first[0][:2]  # neither the float model nor round-to-nearest looks at the data
    assert others[1][0][2] != first[0][2]
    tensor = lowbit.Calibration(torch.ones(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="a text file or a list of strings"):
        evaluation.compare(lambda: copy.deepcopy(net), tokenizer, ["clip(int4)"], source, calibration=tensor, cache=tmp_path)


def test_the_command_calibrates(model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(material / "text.txt")
    recipes = "int3,gptq(int3, damping=0.02, passes=1)"
    asked = ["eval", str(model), "-r", recipes, "--tasks", "perplexity", "--text", text, "--context", "32", "--json"]
    assert run([*asked, "--divergence", "0"]) == 2
    assert "looks at data: give a text with --calibration FILE" in capsys.readouterr().err
    assert run([*asked, "--divergence", "0", "--calibration", text, "--rows", "4", "--length", "32"]) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert [outcome["recipe"] for outcome in outcomes] == ["float", "int3", "gptq(int3, damping=0.02, passes=1)"]
    assert outcomes[1]["perplexity"]["value"] != outcomes[2]["perplexity"]["value"]


def test_a_fingerprint_is_of_the_content(loaded: tuple[nn.Module, Any], model: Path) -> None:
    net, tokenizer = loaded
    first = fingerprint(net, tokenizer)
    again = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert fingerprint(again, tokenizer) == first
    changed = copy.deepcopy(net)
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-6
    halves = copy.deepcopy(net).half()
    configured = copy.deepcopy(net)
    configured.config.rms_norm_eps *= 2
    weights_alone, with_activations = quantized(net, "int8"), quantized(net, "int8_dynamic_activation_int8_weight")
    words = copy.deepcopy(tokenizer)
    words.add_tokens(["w99"])
    others = [fingerprint(m, tokenizer) for m in (changed, halves, configured, weights_alone, with_activations)]
    assert len({first, *others, fingerprint(net, words)}) == 7


def test_figures_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "key")
    assert cache.figure("name", 1, lambda: [1.5, None]) == [1.5, None]
    assert cache.figure("name", 1, lambda: 1 / 0) == [1.5, None]
    with pytest.raises(ZeroDivisionError):
        cache.figure("name", 2, lambda: 1 / 0)
    (half,) = (tmp_path / next(tmp_path.iterdir()).name).glob("name-*.json")
    half.write_text("[1.5, nu", encoding="utf-8")
    assert cache.figure("name", 1, lambda: 2) == 2
    with pytest.raises(ZeroDivisionError):
        Cache(tmp_path, "another").figure("name", 1, lambda: 1 / 0)
