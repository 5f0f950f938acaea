"""Tokens per second of whole models: each recipe beside the float model, in one run, for one sequence or a batch of them.

Weights are read once a token, so what a token takes is at least its weights over the bandwidth of the memory; each figure
says how much of that it reaches. On a GPU the step that decodes a token is one CUDA graph, over a key-value cache of fixed
size, for the float model as for the quantized ones.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from rich.table import Table
from torch import nn

from lowbit import QEmbedding, QLinear, fuse_, quantize_
from lowbit.experts import expert_weights
from lowbit.layer_config import LayerConfig
from lowbit.recipe import Recipe, Rule, block_counts

from .gemv import device_name
from .read_limit import ReadLimits
from .shapes import SHAPES, random_model

__all__ = ["measure", "table", "with_head"]

_READ = 1 << 30  # bytes by which the bandwidth is told
_WARM = 4  # tokens that are written before any is timed


def measure(
    model: str,
    recipes: Sequence[str],
    device: str = "cpu",
    *,
    prompt: int = 2048,
    context: int = 128,
    steps: int = 32,
    batch: int = 1,
    head: str | None = "int8",
    compiled: bool = True,
    fused: bool = True,
    plain: bool = False,
    repeats: int = 3,
    load: Callable[[str, torch.device], nn.Module] | None = None,
    progress: Callable[[str], None] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Figures of ``model``, one of :data:`~lowbit.evals.shapes.SHAPES` (random weights in bfloat16) or what ``load`` takes.

    Args:
        recipes: their names; the float model comes first.
        prompt: tokens that are read in one call, which tells the speed of reading.
        context: tokens behind which others are written; the cache holds those and no more than are written.
        steps: tokens that are written to each sequence, ``repeats`` times.
        batch: sequences that are written to at once: ``tokens_per_second`` is of all, ``ms_per_token`` the time of a step, which
            writes one to each. The bandwidth counts weights, not caches. The prompt is read for one sequence alone.
        head: the scheme of the head, or None to leave it to the recipe.
        compiled: on a GPU, the blocks of the stack go through ``torch.compile`` before decoding, whether quantized or not.
        plain: tokens are written by ``model.generate`` as transformers has it, and what they take holds the reading of the
            ``context`` before them.
        fused: quantized layers that read one tensor are fused (:func:`lowbit.fuse_`).
        keep: called with the figures so far after each recipe.
    """
    where = torch.device(device)
    limit = ReadLimits(where, 5)(_READ)
    out: dict[str, Any] = {
        "model": model, "device": device_name(where), "prompt": prompt, "context": context, "steps": steps, "batch": batch,
        "head": head or "as the recipe says",
        "compiled": compiled and where.type == "cuda" and not plain, "fused": fused, "plain": plain,
        "bytes_per_second": _READ / min(limit.us, limit.no_pdl_us) * 1e6,
        "rows": [], "failures": [],
    }  # fmt: skip
    for name in ("float", *recipes):
        if progress is not None:
            progress(name)
        made = None
        try:
            made = random_model(model, where, torch.bfloat16) if model in SHAPES else _loaded(model, where, load)
            quantizing = time.perf_counter()
            if name != "float":
                quantize_(made, with_head(Recipe.parse(name), made, head))
                if fused:
                    fuse_(made, torch.zeros(1, 1, dtype=torch.long, device=where), use_cache=False)
            quantizing = time.perf_counter() - quantizing
            row = {"recipe": name, "quantize_seconds": quantizing}
            row |= _figures(
                made, where, (prompt, context, steps, batch), out["compiled"], plain, repeats, out["bytes_per_second"]
            )
            out["rows"].append(row)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            out["failures"].append({"recipe": name, "error": " ".join(str(error).split())[:300]})
        del made
        _forget(where)
        if keep is not None:
            keep(out)
    if base := next((row for row in out["rows"] if row["recipe"] == "float"), None):
        for row in out["rows"]:
            row["times_float"] = row["tokens_per_second"] / base["tokens_per_second"]
            row["prefill_times_float"] = base["prefill_ms"] / row["prefill_ms"]
    if keep is not None:
        keep(out)
    return out


def with_head(recipe: Recipe, model: nn.Module, head: str | None) -> Recipe:
    """``recipe`` with a rule of its own for the head of ``model``."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    name = next((name for name, module in model.named_modules() if module is found), None)
    if head is None or name is None:
        return recipe
    return Recipe((Rule(name, LayerConfig.of(head)), *recipe.rules), recipe.name, recipe.rewrites)


def _loaded(model: str, device: torch.device, load: Callable[[str, torch.device], nn.Module] | None) -> nn.Module:
    if load is None:
        raise ValueError(f"no shapes named {model!r}; there are {', '.join(SHAPES)}")
    return load(model, device)


def _forget(device: torch.device) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def weight_bytes(model: nn.Module) -> int:
    """Bytes that a token reads of ``model``: its parameters, each once, of experts those that it chooses, no table but one that
    the head reads too."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, QEmbedding))]
    linear = {id(p) for m in model.modules() if isinstance(m, (nn.Linear, QLinear)) for p in m.parameters(recurse=False)}
    skipped = {id(p) for module in tables for p in module.parameters(recurse=False)} - linear
    experts = {id(module._parameters[leaf]) for module in model.modules() for leaf in expert_weights(module)}
    config: Any = getattr(model, "config", None)
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", getattr(config, "num_local_experts", 1))
    sizes = ((p, p.nbytes) for p in model.parameters() if id(p) not in skipped)
    return round(sum(size * share if id(p) in experts else size for p, size in sizes))


# ---- one model -------------------------------------------------------------------------------------------------------


def _figures(
    model: Any,
    device: torch.device,
    lengths: tuple[int, int, int, int],
    compiled: bool,
    plain: bool,
    repeats: int,
    bandwidth: float,
) -> dict[str, Any]:
    prompt, context, steps, batch = lengths
    read, cuda = weight_bytes(model), device.type == "cuda"
    memory: dict[str, Any] = {}
    with torch.no_grad():  # in inference mode eager layers could not be fused
        reader = _Writer(model, device, prompt)
        if cuda:
            memory["resident_bytes"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        prefill = statistics.median([reader.prefill(prompt) for _ in range(1 + repeats)][1:])
        if cuda:
            memory |= {"prefill_peak_bytes": torch.cuda.max_memory_allocated(), "cache_bytes": reader.cache_bytes}
        del reader
        if plain:
            seconds = _generated(model, device, context, steps, batch, repeats)
        else:
            seconds = _written(model, device, context, steps, batch, compiled, repeats)
    return {
        "tokens_per_second": batch / seconds, "ms_per_token": 1e3 * seconds,
        "prefill_ms": 1e3 * prefill, "prefill_tokens_per_second": prompt / prefill,
        "weight_bytes": read, "bandwidth_utilisation": read / seconds / bandwidth, **memory,
    }  # fmt: skip


def _written(model: Any, device: torch.device, context: int, steps: int, batch: int, compiled: bool, repeats: int) -> float:
    """Seconds a step, which writes a token to each of ``batch`` sequences, behind ``context`` others."""
    writer = _Writer(model, device, context + (repeats + 1) * steps + _WARM, batch)
    writer.prefill(context)
    blocks = _blocks(model)
    # A block's number is a constant in what is compiled of it, so that each is compiled anew.
    with torch._dynamo.config.patch(recompile_limit=4 * len(blocks), accumulated_recompile_limit=16 * len(blocks)):
        for block in blocks if compiled else ():
            block.compile(dynamic=False)
        step = writer.captured() if device.type == "cuda" else writer.step
    step(steps)
    return statistics.median(step(steps) / steps for _ in range(repeats))


def _generated(model: Any, device: torch.device, context: int, steps: int, batch: int, repeats: int) -> float:
    """Seconds a step of ``model.generate``, from ``context`` tokens on to the last of ``steps``."""
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0}

    def run() -> float:
        _wait(device)
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        _wait(device)
        return (time.perf_counter() - start) / steps

    run()
    return statistics.median(run() for _ in range(repeats))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the model's stacks."""
    counts = block_counts(name for name, module in model.named_modules() if isinstance(module, (nn.Linear, QLinear)))
    return [model.get_submodule(f"{stack}.{i}") for stack, count in counts.items() for i in range(count)]


class _Writer:
    """Greedy decoding of ``batch`` sequences over a cache of fixed size; ``step(n)`` writes n tokens to each and gives the
    seconds that took."""

    def __init__(self, model: Any, device: torch.device, length: int, batch: int = 1) -> None:
        from transformers import StaticCache

        self._model, self._device = model, device
        self._cache: Any = StaticCache(config=model.config, max_cache_len=length)
        self._token = torch.zeros(batch, 1, dtype=torch.long, device=device)

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)

    def prefill(self, tokens: int) -> float:
        """Seconds to read as many random ``tokens`` into an empty cache and choose the first to be written."""
        ids = torch.randint(0, self._model.config.vocab_size, (len(self._token), tokens), device=self._device)
        self._cache.reset()
        _wait(self._device)
        start = time.perf_counter()
        output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._token.copy_(output.logits[:, -1:].argmax(-1))
        _wait(self._device)
        return time.perf_counter() - start

    def _one(self) -> None:
        output = self._model(self._token, past_key_values=self._cache, use_cache=True)
        self._token.copy_(output.logits[:, -1:].argmax(-1))

    def step(self, count: int) -> float:
        """Seconds to write ``count`` tokens."""
        _wait(self._device)
        start = time.perf_counter()
        for _ in range(count):
            self._one()
        _wait(self._device)
        return time.perf_counter() - start

    def captured(self) -> Callable[[int], float]:
        """:meth:`step` with each token a replay of one CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM - 1):  # what is compiled or chosen at the first call is not captured
                self._one()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one()

        def step(count: int) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(count):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3

        return step


def table(figures: dict[str, Any]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    compiled = ", blocks compiled" if figures["compiled"] else ", model.generate" if figures["plain"] else ""
    where = f"{figures['model']} on {figures['device']}, batch {figures.get('batch', 1)}"
    title = f"{where}, behind {figures['context']} tokens, prompt of {figures['prompt']}, head {figures['head']}{compiled}"
    made = Table(title=title, title_justify="left")
    names = ("recipe", "tokens/s", "ms a token", "times float", "of the bandwidth", "prompt, ms", "times float", "weights, GB")
    for name in names:
        made.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for r in figures["rows"]:
        made.add_row(
            r["recipe"], f"{r['tokens_per_second']:.1f}", f"{r['ms_per_token']:.3f}", f"{r['times_float']:.2f}",
            f"{r['bandwidth_utilisation']:.3f}", f"{r['prefill_ms']:.1f}", f"{r['prefill_times_float']:.2f}",
            f"{r['weight_bytes'] / 1e9:.3f}",
        )  # fmt: skip
    return made
