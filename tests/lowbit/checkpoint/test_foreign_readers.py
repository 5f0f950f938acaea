"""A program that knows nothing of lowbit fails on what lowbit wrote, instead of making weights up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lowbit
from tests.support import models

SCHEMES = ("int8", "int4", "int3", "fp8", "nvfp4", "mxfp8", "int8_dynamic_activation_int8_weight")
TABLES = {"*embed_tokens": "int8", "lm_head": "int8", "*": None}
KINDS = ("AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")

READ = """
import json, sys
import torch, transformers
transformers.logging.set_verbosity(transformers.logging.CRITICAL)
transformers.utils.logging.disable_progress_bar()
said = {}
for folder in json.load(sys.stdin)["folders"]:
    for kind in json.loads(sys.argv[1]):
        for dtype in ("auto", torch.float16):
            try:
                getattr(transformers, kind).from_pretrained(folder, dtype=dtype)
            except Exception as error:
                said[f"{folder} {kind} {dtype}"] = f"{type(error).__name__}: {error}"
            else:
                said[f"{folder} {kind} {dtype}"] = "loaded"
assert not any(name.partition(".")[0] in ("lowbit", "lowbit_kernels") for name in sys.modules)
json.dump(said, sys.stdout)
"""


def folders(home: Path) -> dict[str, list[str]]:
    """Quantized folders, and the classes that read a quantized weight of each."""
    made: dict[str, list[str]] = {}

    def add(name: str, kinds: tuple[str, ...] = KINDS) -> Path:
        made[str(home / name)] = [*kinds]
        return home / name

    for scheme in SCHEMES:
        model = models.llama(tied=scheme != "int4")
        lowbit.quantize_(model, scheme)
        lowbit.save(model, add(f"save {scheme}"))
    model.save_pretrained(add("save_pretrained"))
    model.save_pretrained(add("shards of transformers"), max_shard_size="30KB")
    lowbit.save(model, add("shards"), max_shard_bytes=30_000)
    tables = models.llama()
    lowbit.quantize_(tables, TABLES)
    lowbit.save(tables, add("embeddings"))
    head = models.llama(tied=False)
    lowbit.quantize_(head, {"lm_head": "int8", "*": None})
    lowbit.save(head, add("head", ("AutoModelForCausalLM",)))
    conv1d = models.gpt2()
    lowbit.quantize_(conv1d, "int8")
    lowbit.save(conv1d, add("Conv1D"))
    models.llama().save_pretrained(home / "float")
    lowbit.quantize_folder(home / "float", add("streamed"), "int8", calibration=torch.arange(40).reshape(2, 20))
    return made


def test_transformers_alone_raises(tmp_path: Path) -> None:
    made = folders(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(KINDS)], input=json.dumps({"folders": [*made]}), capture_output=True, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) == 2 * len(made) * len(KINDS)
    for call, outcome in said.items():
        folder = next(folder for folder in made if call.startswith(f"{folder} Auto"))
        if call.split()[-2] in made[folder]:
            assert outcome.startswith("RuntimeError: You set `ignore_mismatched_sizes` to `False`"), (call, outcome)
        else:  # the base model, which is float, and right
            assert outcome == "loaded", (call, outcome)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torch_alone_raises(scheme: str, tmp_path: Path) -> None:
    model = models.llama()
    lowbit.quantize_(model, scheme)
    lowbit.save(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.self_attn\.q_proj\.weight"):
        models.llama().load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
