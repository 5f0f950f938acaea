"""What quantization cost a model: the float model and its quantized versions on the same text and the same questions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit import QLinear, quantize_, save, trace_kernels

from .exam import Answers, Question, read_exam, sample, take_exam
from .generation import Speed, decode_speed
from .paired import Paired, paired_difference
from .perplexity import Perplexity, perplexity

__all__ = ["TOY", "TOY_DATA", "TOY_TEXT", "Material", "Outcome", "compare"]

TOY = Path(__file__).parent / "toy" / "model"
"""The model in the box."""
TOY_DATA = Path(__file__).parent / "toy" / "data"
"""Its exam: ``dev/SUBJECT_dev.csv`` and ``test/SUBJECT_test.csv``."""
TOY_TEXT = TOY_DATA / "heldout.txt"
"""Text of its world that it was not trained on."""

PROMPT = 64  # rows of x that stand for a prompt
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Material:
    """What every model is measured on: a text in chunks of ``context`` tokens (at most ``chunks``), an exam, and the
    solved questions of each subject that stand before its questions."""

    text: str
    questions: tuple[Question, ...]
    examples: Mapping[str, Sequence[Question]] = field(default_factory=dict)
    context: int | None = None
    chunks: int | None = None

    @staticmethod
    def read(
        data: str | Path = TOY_DATA,
        text: str | Path = TOY_TEXT,
        *,
        limit: int | None = None,
        shots: int = 0,
        context: int | None = None,
        chunks: int | None = None,
    ) -> Material:
        """The exam in the folder ``data`` and the UTF-8 file ``text``.

        ``limit``: questions a subject at most, always the same ones; ``shots``: 0..5 examples from the dev split.
        Raises ``ValueError`` for anything that cannot be read, naming the file.
        """
        if not 0 <= shots <= 5:
            raise ValueError(f"shots must be 0..5, got {shots}")
        examples: dict[str, list[Question]] = {}
        for question in read_exam(data, "dev") if shots else ():
            examples.setdefault(question.subject, []).append(question)
        try:
            content = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the text {text} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        questions = tuple(sample(read_exam(data), limit))
        return Material(content, questions, {name: group[:shots] for name, group in examples.items()}, context, chunks)


@dataclass(frozen=True)
class Outcome:
    """One model, measured.

    Attributes:
        recipe: what it was quantized by; ``"float"`` for the model as it came, ``"as loaded"`` where that was quantized.
        bits_per_weight: stored bits of a weight of the layers that the recipe changed, scales included.
        file_bytes: what its weights take on the disk, written by :func:`lowbit.save`; None where not asked for.
        difference: the accuracy against the float model on the same questions; None for the float model.
        kernels: which kernels ran, by calls, for a single token (``"decode"``) and for ``prompt`` rows (``"prompt"``).
        seconds: what quantizing and measuring took.
    """

    recipe: str
    bits_per_weight: float
    file_bytes: int | None
    perplexity: Perplexity
    answers: Answers
    difference: Paired | None
    kernels: dict[str, dict[str, int]]
    speed: Speed | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; accuracies are 0..1."""
        return {
            "recipe": self.recipe,
            "bits_per_weight": self.bits_per_weight,
            "file_bytes": self.file_bytes,
            "perplexity": asdict(self.perplexity),
            "exam": {
                "questions": len(self.answers.questions),
                "accuracy": self.answers.accuracy,
                "shortened": self.answers.shortened,
                "difference": None if self.difference is None else asdict(self.difference),
            },
            "kernels": self.kernels,
            "speed": None if self.speed is None else asdict(self.speed),
            "seconds": self.seconds,
        }


def compare(
    load: Callable[[], nn.Module],
    tokenizer: Any,
    recipes: Sequence[Any],
    material: Material,
    *,
    files: bool = False,
    speed: bool = False,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Iterator[Outcome]:
    """The float model, then it quantized by each of ``recipes``, one outcome at a time.

    Args:
        load: makes the float model anew; a model is let go before the next is made.
        recipes: what :func:`lowbit.quantize_` takes; their names stand in the outcomes.
        files: also write each to a temporary folder and count its bytes.
        speed: also time decoding.
        device: where the models run.
        progress: called with (what is being done, done, in all).
    """
    baseline: Answers | None = None
    for what in (None, *recipes):
        start = time.perf_counter()
        model = load().eval()
        name = _name(model) if what is None else str(getattr(what, "name", what))
        if device is not None:
            model = model.to(device)
        bits = _bits_as_loaded(model) if what is None else _quantized_bits(model, what)
        outcome = _measure(model, tokenizer, material, name, files, speed, progress)
        del model
        baseline = baseline or outcome["answers"]
        difference = None if what is None else paired_difference(baseline.right, outcome["answers"].right)
        seconds = time.perf_counter() - start
        yield Outcome(recipe=name, bits_per_weight=bits, difference=difference, seconds=seconds, **outcome)


def _name(model: nn.Module) -> str:
    return "as loaded" if any(isinstance(module, QLinear) for module in model.modules()) else "float"


def _bits_as_loaded(model: nn.Module) -> float:
    """Of the linear layers; where some are quantized, of these."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    layers = [layer for layer in layers if isinstance(layer, QLinear)] or layers
    bits = [getattr(layer.weight, "bits_per_weight", 8 * layer.weight.element_size()) * layer.weight.numel() for layer in layers]
    return sum(bits) / max(sum(layer.weight.numel() for layer in layers), 1)


def _quantized_bits(model: nn.Module, what: Any) -> float:
    changed = quantize_(model, what).changed
    numbers = [layer.shape[0] * layer.shape[1] for layer in changed]
    return sum(layer.bits_per_weight * n for layer, n in zip(changed, numbers, strict=True)) / sum(numbers)


def _measure(
    model: nn.Module, tokenizer: Any, material: Material, name: str, files: bool, speed: bool, progress: Progress | None
) -> dict[str, Any]:
    def step(what: str) -> Callable[[int, int], None]:
        return lambda done, total: None if progress is None else progress(f"{name}: {what}", done, total)

    size = _file_bytes(model) if files else None
    loss = perplexity(
        model, tokenizer, material.text, context=material.context, limit=material.chunks, progress=step("perplexity")
    )
    answers = take_exam(model, tokenizer, material.questions, examples=material.examples, progress=step("exam"))
    kernels = {"decode": _kernels(model, 1), "prompt": _kernels(model, PROMPT)}
    return {
        "file_bytes": size,
        "perplexity": loss,
        "answers": answers,
        "kernels": kernels,
        "speed": decode_speed(model) if speed else None,
    }


def _file_bytes(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
        save(model, folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _kernels(model: nn.Module, m: int) -> dict[str, int]:
    """Calls of each kernel for an input of ``m`` tokens; empty where no quantized operator ran."""
    ids = torch.ones(1, m, dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode(), trace_kernels() as trace:
        model(ids)
    return dict(trace.kernels())
