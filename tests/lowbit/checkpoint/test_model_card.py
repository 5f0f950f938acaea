"""What a quantized folder says of itself, in config.json and in README.md, whoever wrote it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

import lowbit
from lowbit.recipe import Recipe
from tests.support import models

DATA = {
    "input_ids": models.tokens(6, 20),
    "attention_mask": torch.ones(6, 20, dtype=torch.long).index_fill(1, torch.tensor([0]), 0),
}
WAYS = ("save", "save_pretrained", "shards", "loaded and saved", "from_pretrained and saved", "streamed")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats") / "small"
    models.llama().save_pretrained(folder)
    (folder / "README.md").write_text("of the float model\n")
    return folder


def read(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def written(way: str, whole: Path, folder: Path, what: Any) -> Path:
    if way == "streamed":
        lowbit.quantize_folder(whole, folder, what, calibration=[DATA])
        return folder
    model = read(whole)
    lowbit.quantize_(model, what, calibration=[DATA])
    if way == "shards":
        lowbit.save(model, folder, max_shard_bytes=20_000)
    elif way == "save_pretrained":
        model.save_pretrained(folder)
    else:
        lowbit.save(model, folder)
        if way == "loaded and saved":
            lowbit.save(lowbit.load(folder), folder)
        elif way == "from_pretrained and saved":
            read(folder).save_pretrained(folder)
    return folder


def card(folder: Path) -> tuple[dict[str, Any], str]:
    head, text = re.fullmatch(r"---\n(.*?)---\n(.*)", (folder / "README.md").read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
    return yaml.safe_load(head), text


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_says_how_it_was_made(way: str, whole: Path, tmp_path: Path) -> None:
    what = Recipe.of({"*mlp*": lowbit.gptq("int3"), "*": "int8"})
    folder = written(way, whole, tmp_path / "out", what)
    reported = json.loads((folder / "config.json").read_text())["quantization_config"]
    held = [t for file in folder.glob("*.safetensors") for t in load_file(file).items()]
    size = sum(t.nbytes for name, t in held if t.dim() == 3 or name.rpartition(".")[2] in ("scale", "zero_point"))
    weights = sum(m.weight.numel() for m in read(whole).modules() if isinstance(m, torch.nn.Linear)) - 96 * 64  # but for the head
    bits = 8 * size / weights
    assert reported.pop("bits_per_weight") == pytest.approx(bits, abs=1e-4)
    assert reported == {
        "quant_method": "lowbit", "version": 2, "recipe": what.to_dict(), "lowbit_version": lowbit.__version__,
        "base_model": "small", "calibration": {"rows": 6, "tokens": 6 * 19},
    }  # fmt: skip
    head, text = card(folder)
    assert head == {"library_name": "transformers", "tags": ["lowbit"]}
    for words in (
        "| small |",
        f"| {bits:.3f}, in",
        "| 6 rows, 114 tokens |",
        f"| lowbit {lowbit.__version__} |",
        "| version 2 |",
    ):
        assert words in text
    assert str(tmp_path) not in (folder / "README.md").read_text()
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "yaml"))  # type: ignore[index]
    assert Recipe.from_text(recipe) == what
    made: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, made)
    assert torch.equal(made["model"](models.tokens()).logits, lowbit.load(folder)(models.tokens()).logits)


def test_a_config_says_it_too(whole: Path, tmp_path: Path) -> None:
    read(whole, quantization_config=lowbit.Config("int4")).save_pretrained(tmp_path)
    reported = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert reported["recipe"] == Recipe.of("int4").to_dict()
    assert reported["base_model"] == "small"
    assert "calibration" not in reported
    assert "| none: rounded without data |" in card(tmp_path)[1]
    assert "`int4`, below" in card(tmp_path)[1]


def test_a_model_of_the_hub_is_named_as_there(tmp_path: Path) -> None:
    model = models.llama()
    model.config._name_or_path = model.name_or_path = "somebody/small-1.1B"
    lowbit.quantize_(model, "int4")
    lowbit.save(model, tmp_path)
    head, _ = card(tmp_path)
    assert (head["base_model"], head["base_model_relation"]) == ("somebody/small-1.1B", "quantized")


@pytest.mark.parametrize("way", ["save", "save_pretrained", "streamed"])
def test_a_card_of_somebody_elses_stays(way: str, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine\n")
    written(way, whole, tmp_path, "int4")
    assert (tmp_path / "README.md").read_text() == "mine\n"
    (tmp_path / "README.md").unlink()
    written(way, whole, tmp_path, "int4")
    assert "uint4" in card(tmp_path)[1]
    written(way, whole, tmp_path, "int8")
    assert "uint4" not in card(tmp_path)[1]
    lowbit.save(read(whole), tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_what_nobody_recorded_is_told_as_that(tmp_path: Path) -> None:
    """Layers put in place by hand, and a recipe of a version that is yet to come."""
    model = models.llama()
    layer = model.model.layers[0].mlp
    layer.up_proj = lowbit.QLinear(lowbit.QTensor.quantize(layer.up_proj.weight.detach(), "int4"))
    lowbit.save(model, tmp_path)
    assert "| recipe | not recorded |" in card(tmp_path)[1]
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["recipe"] = {"name": "later", "rules": [{"match": "*", "weight": "int4", "by": "magic"}]}
    path.write_text(json.dumps(config))
    assert torch.equal(lowbit.load(tmp_path)(models.tokens()).logits, model(models.tokens()).logits)
