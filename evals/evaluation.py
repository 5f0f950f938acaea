"""What quantization cost a model: the float model and its quantized versions on the same text and the same questions."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit import Calibration, QTensor, Recipe, quantize_, save, trace_kernels
from lowbit.layers import Layer, find_layers
from lowbit.plans import Plan

from .cache import Cache, digest, fingerprint
from .divergence import Divergence, Reference, divergence
from .generation import Speed, decode_speed
from .harness import BATCH, Score, ask, scores_of, write_results
from .layers import float_weights, layer_figures, size_of
from .paired import Paired, corrected, paired_difference
from .perplexity import Perplexity, context_of, perplexity, windows_of
from .report import FORMAT
from .results import origin
from .tasks import MMLU, Suite, read_tasks
from .texts import read_text
from .toy import bundled
from .toy.bundled import TOY, TOY_DATA, TOY_TEXT

__all__ = ["TOY", "TOY_DATA", "TOY_TEXT", "Material", "Outcome", "compare", "result"]

PROMPT = 64  # rows of x that stand for a prompt
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Material:
    """What every model is measured on.

    Attributes:
        suite: tasks of lm-eval; None for none.
        text: for perplexity, in chunks of ``context`` tokens that begin ``stride`` tokens apart, at most ``chunks``; None
            for none.
        batch: prompts of a task at a time.
        compared: chunks, evenly from all of the text, on which the divergence from the float model is measured; 0 for none.
    """

    suite: Suite | None
    text: str | None
    context: int | None = None
    stride: int | None = None
    chunks: int | None = None
    batch: int = BATCH
    compared: int = 0

    @staticmethod
    def read(
        data: str | Path | None = TOY_DATA,
        text: str | Path | None = TOY_TEXT,
        *,
        tasks: Sequence[str] = (MMLU,),
        limit: int | None = None,
        shots: int | None = None,
        context: int | None = None,
        stride: int | None = None,
        chunks: int | None = None,
        batch: int = BATCH,
        compared: int = 0,
    ) -> Material:
        """The ``tasks`` with their rows from the folder ``data`` (None: the hub), and the UTF-8 file ``text``, or ``"wikitext"``
        from the hub.

        ``limit``: questions a task (of MMLU: a subject) at most, the first ones; ``shots``: solved examples before each, the
        task's own number if None. Raises ``ValueError`` for anything that cannot be read, naming the file.
        """
        if data == TOY_DATA or text == TOY_TEXT:
            bundled.check()
        content = None if text is None else read_text(text)
        suite = read_tasks(tasks, data, limit=limit, shots=shots) if tasks else None
        return Material(suite, content, context, stride, chunks, batch, compared)


@dataclass(frozen=True)
class Outcome:
    """One model, measured. What was not asked for is None, or empty.

    Attributes:
        recipe: what it was quantized by; ``"float"`` for the model as it came, ``"as loaded"`` where that was quantized.
        bits_per_weight: stored bits of a weight of the layers that the recipe changed, scales included.
        file_bytes: what its weights take on the disk, written by :func:`lowbit.save`.
        size: bytes of its tensors by kind, as saved: :func:`lowbit.evals.layers.size_of`.
        tasks: a score for each task or group that was asked for.
        differences: of each task the accuracy against the float model on the same questions; empty for the float model.
        divergence: how far its predictions are from the float model's on the same text; None for the float model.
        layers, histograms: :func:`lowbit.evals.layers.layer_figures`.
        kernels: which kernels ran, by calls, for a single token (``"decode"``) and for ``prompt`` rows (``"prompt"``).
        shortened: prompts that were cut at their beginning to fit the model's context.
        notes: what the plan has to say of the recipe in this model: of rules that quantize nothing.
        seconds: what quantizing and measuring took.
    """

    recipe: str
    bits_per_weight: float
    file_bytes: int | None
    size: Mapping[str, int]
    perplexity: Perplexity | None
    tasks: Mapping[str, Score]
    divergence: Divergence | None
    kernels: Mapping[str, Mapping[str, int]]
    speed: Speed | None
    seconds: float
    shortened: int = 0
    notes: Sequence[str] = ()
    differences: Mapping[str, Paired] = field(default_factory=dict)
    layers: Sequence[Mapping[str, Any]] = ()
    histograms: Sequence[Mapping[str, Any]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; accuracies are 0..1."""
        plain = {name: None if (part := getattr(self, name)) is None else asdict(part) for name in ("perplexity", "speed")}
        plain["divergence"] = None if self.divergence is None else self.divergence.to_dict()
        tasks = {
            name: {**_plain(score), "difference": self.differences[name].to_dict() if name in self.differences else None}
            for name, score in self.tasks.items()
        }
        reused = (
            "recipe",
            "bits_per_weight",
            "file_bytes",
            "size",
            "kernels",
            "layers",
            "histograms",
            "shortened",
            "notes",
            "seconds",
        )
        return {**{name: getattr(self, name) for name in reused}, **plain, "tasks": tasks}


def result(model: str, outcomes: Sequence[Outcome], seconds: float, gemv: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All of an evaluation as plain data, in the form that :func:`lowbit.evals.report.write_report` reads.

    ``gemv``: weights per second, as of :func:`lowbit.evals.gemv.measure`.
    """
    return {
        "format": FORMAT,
        "origin": origin(),
        "model": model,
        "tasks": [*outcomes[0].tasks, *(() if outcomes[0].perplexity is None else ("perplexity",))],
        "seconds": seconds,
        "outcomes": [outcome.to_dict() for outcome in outcomes],
        "gemv": gemv,
    }


def compare(
    load: Callable[[], nn.Module],
    tokenizer: Any,
    recipes: Sequence[Any],
    material: Material,
    *,
    calibration: Any = None,
    files: bool = False,
    speed: bool = False,
    device: str | torch.device | None = None,
    cache: str | Path | None = None,
    harness: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """The float model, then it quantized by each of ``recipes``, in this order.

    Args:
        load: makes the float model anew; a model is let go before the next is made.
        recipes: what :func:`lowbit.quantize_` takes; their names stand in the outcomes.
        calibration: what the rounders of recipes may look at, as :func:`lowbit.quantize_` takes it. With a ``cache`` it is a
            text file or a list of strings, which can be told from others.
        files: also write each to a temporary folder and count its bytes.
        speed: also time decoding.
        device: where the models run.
        cache: a folder that keeps what was measured, so that an evaluation that was interrupted goes on. Another model,
            recipe, task, device or version of the software is measured anew.
        harness: a folder that gets lm-eval's own JSON of each model, under its recipe's name.
        progress: called with (what is being done, done, in all).
    """
    data = None if calibration is None else Calibration.of(calibration)
    course = _Evaluation(load, tokenizer, material, data, device, None if cache is None else Path(cache), progress)
    outcomes: list[Outcome] = []
    try:
        for recipe in (None, *recipes):
            outcomes.append(course.measure(recipe, files, speed, None if harness is None else Path(harness)))
    finally:
        course.close()
    return _compared(outcomes)


def _compared(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """``outcomes`` with differences from the first, corrected for all comparisons together."""
    first, *others = outcomes
    places = [(i, name) for i, other in enumerate(others) for name in other.tasks]
    found = corrected([paired_difference(first.tasks[name].right, others[i].tasks[name].right) for i, name in places])
    by_outcome: list[dict[str, Paired]] = [{} for _ in others]
    for (i, name), paired in zip(places, found, strict=True):
        by_outcome[i][name] = paired
    return [first, *(replace(other, differences=paired) for other, paired in zip(others, by_outcome, strict=True))]


class _Evaluation:
    """One evaluation under way: what its models share."""

    def __init__(
        self,
        load: Callable[[], nn.Module],
        tokenizer: Any,
        material: Material,
        calibration: Calibration | None,
        device: str | torch.device | None,
        cache: Path | None,
        progress: Progress | None,
    ) -> None:
        self.load, self.tokenizer, self.material, self.device = load, tokenizer, material, device
        self.calibration = calibration
        self.folder, self.progress = cache, progress
        self.identity: str | None = None
        self.reference: Reference | None = None

    def close(self) -> None:
        """Give back what the float model's predictions take on the disk."""
        if self.reference is not None:
            self.reference.close()

    def float_model(self) -> nn.Module:
        """The model as it comes, on its device."""
        model = self.load().eval()
        return model if self.device is None else model.to(self.device)

    def data_for(self, recipe: Any) -> Calibration | None:
        """The calibration, where ``recipe`` is a recipe that may look at it."""
        if recipe is None or self.calibration is None:
            return None
        recipe = Recipe.of(recipe)
        rounders = {rule.config.rounder for rule in recipe.rules if rule.config is not None}
        return self.calibration if recipe.needs_data or recipe.rewrites or rounders - {"rtn"} else None

    def measure(self, recipe: Any, files: bool, speed: bool, harness: Path | None) -> Outcome:
        """One outcome; figures that the cache holds are not measured again, and a model that needs none is not made."""
        start = time.perf_counter()
        lazy_model = _LazyModel(self, recipe)
        if self.identity is None and self.folder is not None:
            self.identity = fingerprint(lazy_model.model, self.tokenizer)
        recipe_dict = None if recipe is None else Recipe.of(recipe).to_dict()
        key = {"model": self.identity, "recipe": recipe_dict, "device": str(self.device), "software": _software()}
        if self.folder is not None and (data := self.data_for(recipe)) is not None:
            key["calibration"] = _identity_of(data)
        cache = Cache(self.folder, key)
        name = (
            str(getattr(recipe, "name", recipe))
            if recipe is not None
            else cache.figure("name", 0, lambda: _name(lazy_model.model))
        )

        def step(message: str) -> Callable[[int, int], None]:
            return lambda done, total: None if self.progress is None else self.progress(f"{name}: {message}", done, total)

        weights = cache.figure("weights", 1, lazy_model.weights)
        size = cache.figure("file", 0, lambda: _file_bytes(lazy_model.model)) if files else None
        loss = self._perplexity(cache, lazy_model, step("perplexity"))
        answers = self._answers(cache, lazy_model, step("questions"))
        if answers is not None and harness is not None:
            write_results(answers["lm_eval"], harness / _as_file(name))
        fraction = self._divergence(cache, lazy_model, recipe, step("divergence"))
        kernels = cache.figure(
            "kernels", PROMPT, lambda: {"decode": _kernels(lazy_model.model, 1), "prompt": _kernels(lazy_model.model, PROMPT)}
        )
        timed = cache.figure("speed", 0, lambda: asdict(decode_speed(lazy_model.model))) if speed else None
        seconds = cache.figure("seconds", [files, speed, *self._of()], lambda: time.perf_counter() - start)
        return Outcome(
            recipe=name, file_bytes=size, **weights, perplexity=loss, divergence=fraction, kernels=kernels,
            tasks={} if answers is None else {task: Score(**score) for task, score in answers["scores"].items()},
            speed=None if timed is None else Speed(**timed), seconds=seconds,
            shortened=0 if answers is None else answers["shortened"],
        )  # fmt: skip

    def _of(self) -> list[Any]:
        """What figures of the text and the tasks depend on."""
        m = self.material
        return [m.text, m.context, m.stride, m.chunks, m.batch, m.compared, None if m.suite is None else m.suite.identity]

    def _perplexity(self, cache: Cache, lazy_model: _LazyModel, progress: Callable[[int, int], None]) -> Perplexity | None:
        m = self.material
        if m.text is None:
            return None
        text, options = m.text, {"context": m.context, "stride": m.stride, "limit": m.chunks}
        measured = cache.figure(
            "perplexity",
            [text, options],
            lambda: asdict(perplexity(lazy_model.model, self.tokenizer, text, progress=progress, **options)),
        )
        return Perplexity(**measured)

    def _answers(self, cache: Cache, lazy_model: _LazyModel, progress: Callable[[int, int], None]) -> dict[str, Any] | None:
        suite, batch = self.material.suite, self.material.batch
        if suite is None:
            return None

        def asked() -> dict[str, Any]:
            from lm_eval.utils import handle_non_serializable

            found = ask(lazy_model.model, self.tokenizer, suite, batch=batch, cache=cache, progress=progress)
            shortened, scores = found.pop("shortened"), scores_of(found, suite)
            found.pop("samples")
            plain = json.loads(json.dumps(found, default=handle_non_serializable))
            return {"scores": {name: asdict(score) for name, score in scores.items()}, "lm_eval": plain, "shortened": shortened}

        return cache.figure("answers", [suite.identity, batch], asked)

    def _divergence(
        self, cache: Cache, lazy_model: _LazyModel, recipe: Any, progress: Callable[[int, int], None]
    ) -> Divergence | None:
        m = self.material
        if m.text is None or m.compared < 2:
            return None
        if recipe is None:
            # While the float model is at hand; where everything else is known already, it is made again when it is needed.
            if lazy_model.exists:
                self._make_reference(lazy_model.model, progress)
            return None

        def measured() -> dict[str, Any]:
            if self.reference is None:
                self._make_reference(self.float_model(), progress)
            assert self.reference is not None
            return asdict(divergence(lazy_model.model, self.reference, progress=progress))

        return Divergence(**cache.figure("divergence", [m.text, m.context, m.compared], measured))

    def _make_reference(self, model: nn.Module, progress: Callable[[int, int], None]) -> None:
        m = self.material
        assert m.text is not None
        chunks = windows_of(self.tokenizer, m.text, context_of(model, m.context))
        if len(chunks) >= 2:
            self.reference = Reference.collect(model, chunks, limit=m.compared, progress=progress)


class _LazyModel:
    """A model that is loaded and quantized when somebody asks for it."""

    def __init__(self, course: _Evaluation, recipe: Any) -> None:
        self._course, self._recipe = course, recipe
        self._model: nn.Module | None = None
        self._figures: dict[str, Any] = {}

    @property
    def exists(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            model = self._course.float_model()
            if self._recipe is None:
                self._figures = {"bits_per_weight": _bits_as_loaded(model), "layers": [], "histograms": [], "notes": []}
            else:
                before = float_weights(model)
                plan = quantize_(model, self._recipe, calibration=self._course.data_for(self._recipe))
                layers, histograms = layer_figures(model, before)
                self._figures = {
                    "bits_per_weight": _quantized_bits(plan), "layers": layers, "histograms": histograms,
                    "notes": list(_idle(plan)),
                }  # fmt: skip
            self._model = model
        return self._model

    def weights(self) -> dict[str, Any]:
        """Bits a weight, bytes by kind, and figures of each layer."""
        size = size_of(self.model)
        return {**self._figures, "size": size}


def _identity_of(calibration: Calibration) -> list[Any]:
    """What tells a calibration from others. Raises ``ValueError`` for data that has no text."""
    data = calibration.data
    if isinstance(data, str | Path):
        data = Path(data).read_text(encoding="utf-8")
    elif not (isinstance(data, list | tuple) and all(isinstance(row, str) for row in data)):
        raise ValueError("an evaluation with a cache is calibrated on a text file or a list of strings: give one, or no cache")
    return [digest(data), calibration.rows, calibration.length]


def _software() -> dict[str, str]:
    """Versions that figures may depend on."""
    names = ("lowbit", "torch", "transformers", "tokenizers", "lm-eval")
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _plain(score: Score) -> dict[str, Any]:
    found = asdict(score)
    if found["subjects"] is None:
        del found["subjects"]
    return found


def _as_file(name: str) -> str:
    """A recipe's name as that of a folder."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)[:80]


def _name(model: nn.Module) -> str:
    return "as loaded" if any(isinstance(layer.weight, QTensor) for layer in _counted(model)) else "float"


def _bits_as_loaded(model: nn.Module) -> float:
    """Of the linear layers and experts; where some are quantized, of these."""
    layers = _counted(model)
    layers = [layer for layer in layers if isinstance(layer.weight, QTensor)] or layers
    bits = [getattr(layer.weight, "bits_per_weight", 8 * layer.weight.element_size()) * layer.weight.numel() for layer in layers]
    return sum(bits) / max(sum(layer.weight.numel() for layer in layers), 1)


def _counted(model: nn.Module) -> list[Layer]:
    return [layer for layer in find_layers(model) if layer.kind in ("linear", "experts")]


def _idle(plan: Plan) -> Iterator[str]:
    """The notes of ``plan`` on rules."""
    return (note for note in plan.notes if note.startswith("pattern "))


def _quantized_bits(plan: Plan) -> float:
    quantized = plan.quantized
    numbers = [math.prod(layer.shape) for layer in quantized]
    return sum(layer.bits_per_weight * n for layer, n in zip(quantized, numbers, strict=True)) / sum(numbers)


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
