"""Tokens a second of a whole model on a CPU by ``model.generate``: quantized, the same fused, and llama.cpp on files of its own.

All of them are interleaved in one run, so that whatever else the machine does affects each; ``xllamacpp`` runs the GGUF files. A
token's time is that between two tokens behind the prompt, the prompt's that to the first.

    python -m lowbit.evals.decoding FOLDER --gguf FILE.gguf --requantize Q4_0 --out evals/results/decoding_cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lowbit import fuse_, quantize_
from lowbit.recipe import Recipe

from .gemv import device_name
from .generate import weight_bytes, with_head
from .read_limit import ReadLimits
from .results import write_result

__all__ = ["main", "measure", "requantized", "table"]

_READ = 1 << 29  # bytes by which the bandwidth is told
Run = Callable[
    [list[int], int], tuple[float, list[float]]
]  # (prompt, tokens) to seconds of the prompt and of each token behind it


def measure(
    folder: str | Path, ggufs: Sequence[Path] = (), recipe: str = "int4", prompt: int = 126, tokens: int = 64, rounds: int = 7
) -> dict[str, Any]:
    """Figures of the model in ``folder`` quantized by ``recipe``, its head too, and of ``ggufs``: ``rounds``, interleaved.

    Each round writes ``tokens`` behind ``prompt`` random ones; a row has the median and the least time of a token of all rounds,
    and the median of the prompts. ``parts``: where a token's milliseconds go, before and after fusing."""
    transformers: Any = importlib.import_module("transformers")
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).eval()
    quantize_(plain, with_head(Recipe.parse(recipe), plain, recipe))
    plain.generation_config.eos_token_id = None
    fused = copy.deepcopy(plain)
    fuse_(fused, torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    limit = ReadLimits(torch.device("cpu"), 5)(_READ)
    bandwidth = _READ / min(limit.us, limit.no_pdl_us) * 1e6
    runs: dict[str, Run] = {f"lowbit {recipe}": _generate(plain), f"lowbit {recipe}, fused": _generate(fused)}
    with contextlib.ExitStack() as stack:
        for path in ggufs:
            runs[f"llama.cpp {path.stem}"] = stack.enter_context(_llama(path, prompt + tokens))
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
        device_time_before: list[dict[str, float]] = []
        device_time_after: list[dict[str, float]] = []
        for round_ in range(rounds + 1):
            ids = torch.randint(100, plain.config.vocab_size - 400, (prompt,)).tolist()
            for name, run in runs.items():
                first, each = run(ids, tokens if round_ else 4)
                if round_:
                    times[name][0].append(first), times[name][1].extend(each)
            for model, taken in ((plain, device_time_before), (fused, device_time_after)):
                taken.append(_parts(model, prompt))
    rows = []
    for name, (firsts, each) in times.items():
        ms = 1e3 * statistics.median(each)
        rows.append({
            "name": name, "ms_per_token": ms, "least_ms_per_token": 1e3 * min(each), "tokens_per_second": 1e3 / ms,
            "prompt_ms": 1e3 * statistics.median(firsts),
        })  # fmt: skip
    for row in rows:
        row["times_first"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    parts = {"before": _middle(device_time_before), "after": _middle(device_time_after)}
    where = {"model": Path(folder).name, "recipe": recipe, "device": device_name(torch.device("cpu"))}
    settings = {"prompt": prompt, "tokens": tokens, "rounds": rounds}
    return {**where, **settings, "bytes_per_second": bandwidth, "weight_bytes": weight_bytes(plain), "rows": rows, "parts": parts}


class _Clock:
    """A streamer that notes when each token comes."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def put(self, value: Tensor) -> None:
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model: Any) -> Run:
    def run(ids: list[int], tokens: int) -> tuple[float, list[float]]:
        x, clock = torch.tensor([ids]), _Clock()
        model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=tokens, do_sample=False, pad_token_id=0, streamer=clock
        )
        start, first, *rest = clock.marks  # the first mark is of the prompt itself
        return first - start, [b - a for a, b in itertools.pairwise([first, *rest])]

    return run


@contextlib.contextmanager
def _llama(path: Path, context: int) -> Iterator[Run]:
    """llama.cpp on a GGUF file, with as many threads as torch has."""
    llama: Any = importlib.import_module("xllamacpp")
    settings = llama.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = str(path), 256 * (context // 256 + 2), 1, True
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    server = llama.Server(settings)

    def run(ids: list[int], tokens: int) -> tuple[float, list[float]]:
        asked = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
        marks: list[float] = []
        start = time.perf_counter()
        server.handle_completions(asked, lambda answer: marks.append(time.perf_counter()))
        del marks[-1]  # which says that it is over
        return marks[0] - start, [b - a for a, b in itertools.pairwise(marks)]

    yield run


def requantized(path: Path, kind: str, folder: Path) -> Path:
    """The GGUF file ``path`` with all its matrices in ``kind`` (``Q4_0``), in ``folder``."""
    gguf: Any = importlib.import_module("gguf")
    target = folder / f"{path.stem}-{kind}.gguf"
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(str(target), arch=reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(floats, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# ---- where the time goes ---------------------------------------------------------------------------------------------


def _parts(model: Any, prompt: int, steps: int = 12) -> dict[str, float]:
    """Milliseconds of a token by what runs: those of operators by torch's profiler, the others by difference."""
    ids = torch.randint(100, 1000, (1, prompt))
    run = _generate(model)
    generate_seconds = statistics.median(run(ids[0].tolist(), steps)[1])
    cache: Any = importlib.import_module("transformers").DynamicCache(config=model.config)
    token = ids[:, :1]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        forward = _median(lambda: model(token, past_key_values=cache), steps)
        head = model.get_output_embeddings()
        x = torch.randn(1, 1, head.in_features, dtype=torch.bfloat16)
        of_head = _median(lambda: head(x), steps)
        with torch.profiler.profile() as profiled:
            for _ in range(steps):
                model(token, past_key_values=cache)
    op_times = {event.key: event.self_cpu_time_total / 1e6 / steps for event in profiled.key_averages()}
    products = sum(t for name, t in op_times.items() if name.startswith("lowbit_cpu::") and "decoder" not in name) - of_head
    layers = sum(t for name, t in op_times.items() if name == "lowbit_cpu::decoder_steps")
    attention = sum(t for name, t in op_times.items() if "scaled_dot_product" in name)
    others = sum(op_times.values()) - products - of_head - layers - attention
    parts = {
        "products of layers": max(products, 0.0), "whole layers in one call": layers, "head": of_head, "attention": attention,
        "other operators": others, "Python in the model": max(forward - sum(op_times.values()), 0.0),
        "generate": max(generate_seconds - forward, 0.0), "all": generate_seconds,
    }  # fmt: skip
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def _middle(taken: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {name: statistics.median(one[name] for one in taken) for name in taken[0]}


def _median(call: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(figures: dict[str, Any]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    made = Table(title=f"{figures['model']} on {figures['device']}, behind {figures['prompt']} tokens", title_justify="left")
    for name in ("", "tokens/s", "ms", "least", "times", "prompt, ms"):
        made.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in figures["rows"]:
        made.add_row(
            row["name"], f"{row['tokens_per_second']:.1f}", f"{row['ms_per_token']:.2f}", f"{row['least_ms_per_token']:.2f}",
            f"{row['times_first']:.2f}", f"{row['prompt_ms']:.0f}",
        )  # fmt: skip
    return made


def _parts_table(figures: dict[str, Any]) -> Table:
    made = Table(title="ms of a token", title_justify="left")
    for name in ("", "before", "after"):
        made.add_column(name, justify="right" if name else "left", no_wrap=True)
    before, after = figures["parts"]["before"], figures["parts"]["after"]
    for name in before:
        made.add_row(name, f"{before[name]:.2f}", f"{after[name]:.2f}")
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time a model's decoding beside llama.cpp's.")
    parser.add_argument("folder", type=Path, help="a model as transformers loads it")
    parser.add_argument(
        "--gguf", type=Path, action="append", default=[], help="a GGUF file of it, for xllamacpp; may be repeated"
    )
    parser.add_argument("--requantize", action="append", default=[], help="and the first of them in this type (Q4_0), by gguf")
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--prompt", type=int, default=126)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.requantize and not options.gguf:
        parser.error("--requantize needs a --gguf to start from")
    with tempfile.TemporaryDirectory() as where:
        made = [requantized(options.gguf[0], kind, Path(where)) for kind in options.requantize]
        figures = measure(options.folder, [*options.gguf, *made], options.recipe, options.prompt, options.tokens, options.rounds)
    if options.out is not None:
        write_result(options.out, figures)
    Console().print(table(figures), _parts_table(figures))


if __name__ == "__main__":
    main()
