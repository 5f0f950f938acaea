"""Adapters over quantized models in the trainers that people use, with their defaults."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import lowbit
from tests.support import models
from tests.support.optional import from_python_311

SCHEMES = ["int4", "nf4", "nvfp4"]
IDS = torch.randint(3, 40, (16, 12), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in IDS]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module=r"(peft|torch|transformers|trl|accelerate|lightning|pytorch_lightning|datasets)\b"
        )
        yield


def quantized(scheme: str, way: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A quantized model, ``way``: "in memory" or "loaded"."""
    model = models.llama().to(dtype)
    lowbit.quantize_(model, scheme)
    if way == "loaded":
        model.save_pretrained(folder / "quantized")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "quantized", dtype=dtype)
    return model


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))


def arguments(folder: Path, **options: Any) -> Any:
    defaults = {"max_steps": 6, "learning_rate": 3e-2, "per_device_train_batch_size": 4, "logging_steps": 1}
    given = {**defaults, "save_steps": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True, **options}
    return transformers.TrainingArguments(output_dir=str(folder / "out"), **given)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS[:2]).logits


@pytest.mark.sampled
@pytest.mark.works_with("Trainer", "defaults, resume, load_best_model_at_end")
@pytest.mark.parametrize("way", ["in memory", "loaded"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_falls_and_goes_on_from_its_checkpoint(scheme: str, way: str, tmp_path: Path) -> None:
    model = quantized(scheme, way, tmp_path)
    trainer = transformers.Trainer(adapted(copy.deepcopy(model)), arguments(tmp_path), train_dataset=ROWS)
    trainer.train()
    whole = losses(trainer)
    assert whole[-1] < whole[0] - 0.1

    again = transformers.Trainer(adapted(copy.deepcopy(model)), arguments(tmp_path), train_dataset=ROWS)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert losses(again) == whole
    assert torch.equal(logits(again.model), logits(trainer.model))

    best = arguments(tmp_path, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
    chosen = transformers.Trainer(adapted(copy.deepcopy(model)), best, train_dataset=ROWS, eval_dataset=ROWS[:4])
    chosen.train()
    assert torch.equal(logits(chosen.model), logits(trainer.model))  # the last one is the best one here

    trainer.save_model(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(trainer.model))


@pytest.mark.sampled
@pytest.mark.works_with("Trainer", "gradient checkpointing, both kinds")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["in memory", "loaded"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_checkpointing_changes_no_loss(scheme: str, way: str, reentrant: bool, tmp_path: Path) -> None:
    model, found = quantized(scheme, way, tmp_path), []
    for options in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}):
        given = arguments(tmp_path, max_steps=2, save_strategy="no", **options)
        trainer = transformers.Trainer(adapted(copy.deepcopy(model)), given, train_dataset=ROWS)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][1] < found[0][0]


@pytest.mark.works_with("Trainer", "bf16 autocast")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = adapted(peft.prepare_model_for_kbit_training(quantized(scheme, "in memory", tmp_path, dtype)))
    trainer = transformers.Trainer(model, arguments(tmp_path, bf16=True, save_strategy="no"), train_dataset=ROWS)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.1
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.works_with("Trainer", "a quantized model without adapters: refused")
@pytest.mark.parametrize("way", ["in memory", "loaded"])
def test_a_model_without_adapters_is_refused(way: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attach trainable adapters"):
        transformers.Trainer(quantized("int4", way, tmp_path), arguments(tmp_path), train_dataset=ROWS)


@pytest.mark.sampled
@pytest.mark.works_with("TRL", "SFTTrainer")
@pytest.mark.parametrize("way", ["in memory", "loaded"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_supervised_fine_tuning(scheme: str, way: str, tmp_path: Path) -> None:
    trl = from_python_311("trl")
    import datasets

    tokenizer = transformers.AutoTokenizer.from_pretrained(models.word_model(tmp_path / "words"))
    tokenizer.pad_token = tokenizer.eos_token
    model = quantized(scheme, way, tmp_path)
    text = datasets.Dataset.from_dict({"text": [" ".join(models.WORDS[(i + j) % 8] for j in range(10)) for i in range(16)]})

    def trainer() -> Any:
        config = trl.SFTConfig(
            output_dir=str(tmp_path / "out"), max_steps=6, learning_rate=3e-2, logging_steps=1, save_steps=3,
            per_device_train_batch_size=4, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        adapter = peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")
        torch.manual_seed(1)
        return trl.SFTTrainer(
            copy.deepcopy(model), args=config, train_dataset=text, processing_class=tokenizer, peft_config=adapter
        )

    first = trainer()
    first.train()
    assert losses(first)[-1] < losses(first)[0] - 0.1
    second = trainer()
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert torch.equal(logits(first.model), logits(second.model))
    first.save_model(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(first.model))


@pytest.mark.works_with("Lightning", "fit, checkpoint, resume")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_lightning(scheme: str, tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-2)

    model = quantized(scheme, "in memory", tmp_path)

    def trainer(epochs: int) -> Any:
        return lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip

    data = torch.utils.data.DataLoader(list(IDS), batch_size=8)
    whole, half = Module(adapted(copy.deepcopy(model))), Module(adapted(copy.deepcopy(model)))
    trainer(4).fit(whole, data)
    assert whole.losses[-1] < whole.losses[0] - 0.1
    first = trainer(2)
    first.fit(half, data)
    first.save_checkpoint(tmp_path / "half.ckpt")
    rest = Module(adapted(copy.deepcopy(model)))
    trainer(4).fit(rest, data, ckpt_path=tmp_path / "half.ckpt")
    assert half.losses + rest.losses == pytest.approx(whole.losses, rel=1e-6)
    assert torch.equal(logits(rest.model), logits(whole.model))
