"""The documents' tables, from the figures under ``evals/results``.

    python -m lowbit.evals.tables README.md docs/*.md

A table named ``demo`` stands in one of them between ``<!-- demo:begin -->`` and ``<!-- demo:end -->`` and comes from
``demo*.json`` (``speed`` from those of ``gemv``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .ecosystem import LIBRARIES
from .results import replace_file

__all__ = ["RESULTS", "SOURCES", "TABLES", "rewritten"]

RESULTS = Path(__file__).parent / "results"


def rewritten(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between the two marks of ``name``; ``ValueError`` where it does not hold each of them once."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    for mark in (begin, end):
        if text.count(mark) != 1:
            raise ValueError(f"{mark} must stand in the file once, found {text.count(mark)} times")
    before, rest = text.split(begin)
    if end not in rest:
        raise ValueError(f"{begin} must stand before {end}")
    return f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"


def _markdown(head: str, rows: Iterator[tuple[Any, ...]]) -> str:
    names = head.split("|")
    rule = "|".join(" --- " if name.endswith(" ") else " ---: " for name in names)
    lines = [f"| {' | '.join(name.strip() for name in names)} |", f"|{rule}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def sqnr_table(results: list[dict[str, Any]]) -> str:
    """Bits a weight and decibels of every named scheme."""
    (result,) = results
    rows = (
        (f"`{r['name']}`", f"{r['bits_per_weight']:.3f}", f"{r['gaussian_db']:.1f}", f"{r['heavy_tailed_db']:.1f}")
        for r in result["schemes"]
    )
    return _markdown("scheme |bits a weight|Gaussian, dB|heavy-tailed, dB", rows)


def demo_table(results: list[dict[str, Any]]) -> str:
    """What ``lowbit demo`` measured."""
    (result,) = results

    def row(outcome: dict[str, Any]) -> tuple[Any, ...]:
        exam, speed = outcome["tasks"]["mmlu"], outcome["speed"]
        d = exam["difference"]
        paired = "" if d is None else f"{100 * d['difference']:+.1f} [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"
        kernels = ", ".join(f"`{name}`" for name in outcome["kernels"]["decode"]) or "torch"
        return (
            f"`{outcome['recipe']}`", f"{outcome['bits_per_weight']:.2f}", f"{outcome['file_bytes'] / 1e6:.2f}",
            f"{outcome['perplexity']['value']:.2f}", f"{100 * exam['value']:.1f}", paired, kernels,
            f"{speed['tokens_per_second']:.0f}",
        )  # fmt: skip

    head = "scheme |bits a weight|file, MB|perplexity|exam, %|difference, points [95 %]|kernel at M = 1 |tokens/s"
    return _markdown(head, (row(outcome) for outcome in result["outcomes"]))


def mmlu_table(results: list[dict[str, Any]]) -> str:
    """A pretrained model on questions of MMLU: accuracy and its paired difference from the float model's, beside text."""
    return "\n\n".join(map(_mmlu_block, results))


def _mmlu_block(result: dict[str, Any]) -> str:
    settings = result["settings"]

    def row(outcome: dict[str, Any]) -> tuple[Any, ...]:
        exam, kl = outcome["tasks"]["mmlu"], outcome["divergence"]
        d = exam["difference"]
        paired = "" if d is None else f"{100 * d['difference']:+.1f} [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"
        return (
            f"`{outcome['recipe']}`", f"{outcome['bits_per_weight']:.2f}", f"{outcome['file_bytes'] / 1e6:,.0f}",
            f"{100 * exam['value']:.1f}", paired, "" if d is None else f"+{d['gained']} -{d['lost']}",
            f"{outcome['perplexity']['value']:.2f}", "" if kl is None else f"{kl['kl']:.4f}",
            "" if kl is None else f"{100 * kl['agreement']:.1f}",
        )  # fmt: skip

    exam = result["outcomes"][0]["tasks"]["mmlu"]
    calibration = f"; calibrated on {settings['calibration']}" if "calibration" in settings else ""
    title = (
        f"{result['model']}, {exam['n']:,} questions ({settings['questions_a_subject']} of each of {settings['subjects']} "
        f"subjects, {exam['shots']} shots) on {result['gpus'][0]}, {result['date']}, commit {result['commit']}; "
        f"float: {settings['float']}{calibration}:"
    )
    head = "recipe |bits a weight|file, MB|MMLU, %|difference, points [95 %]|answers|perplexity|KL, nats|same token, %"
    return f"{title}\n\n{_markdown(head, map(row, result['outcomes']))}"


def choosing_table(results: list[dict[str, Any]]) -> str:
    """What schemes cost a pretrained model, and how many times as fast as the float layer one token's product is."""
    (mmlu,) = results
    outcomes = {outcome["recipe"]: outcome for outcome in mmlu["outcomes"]}
    speeds = [json.loads((RESULTS / f"gemv_{machine}.json").read_text(encoding="utf-8")) for machine in ("cpu", "h100")]
    names = ["CPU, 2 threads, AVX-512", speeds[1]["device"]]

    def row(scheme: str) -> tuple[Any, ...]:
        outcome, times = outcomes.get(scheme), []
        for one in speeds:
            shape = _shape_shown(one)
            found = [r for r in one["rows"] if (r["n"], r["k"], r["m"], r["scheme"]) == (*shape, 1, scheme)]
            times.append(f"{found[0]['times_float']:.1f}" if found else "")
        if outcome is None:
            return f"`{scheme}`", *[""] * 4, *times
        d = outcome["tasks"]["mmlu"]["difference"]
        paired = f"{100 * d['difference']:+.1f} [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"
        kl, perplexity = outcome["divergence"]["kl"], outcome["perplexity"]["value"]
        return f"`{scheme}`", f"{outcome['bits_per_weight']:.2f}", paired, f"{perplexity:.2f}", f"{kl:.4f}", *times

    head = "scheme |bits a weight|MMLU|perplexity|KL, nats|" + "|".join(f"M = 1, {name}" for name in names)
    return _markdown(head, (row(scheme) for scheme in ("int8", "nvfp4", "nf4", "int4", "mxfp4", "int3")))


def prompts_table(results: list[dict[str, Any]]) -> str:
    """Products of many rows on a CPU, in shapes of a model: how many times as fast as F.linear in bfloat16."""
    (result,) = results
    rows, batches = result["rows"], sorted({r["m"] for r in result["rows"]})
    cases = list(dict.fromkeys((r["scheme"], r["n"], r["k"]) for r in rows))
    times: dict[tuple[str, int, int], dict[int, Any]] = {case: {} for case in cases}
    for r in rows:
        times[r["scheme"], r["n"], r["k"]][r["m"]] = r

    def row(case: tuple[str, int, int]) -> tuple[Any, ...]:
        scheme, n, k = case
        found = [times[case][m] for m in batches]
        return f"`{scheme}`", f"{n} x {k}", f"`{found[-1]['kernel']}`", *(f"{r['times_float']:.2f}" for r in found)

    title = f"{result['device']}, torch {result['versions']['torch']}, {result['date']}, times F.linear in bfloat16:"
    head = "scheme |N x K |kernel |" + "|".join(f"M = {m}" for m in batches)
    return f"{title}\n\n{_markdown(head, map(row, cases))}"


def gpu_targets_table(results: list[dict[str, Any]]) -> str:
    """Triton's kernels by GPU: how many of the cases compile."""
    (result,) = results
    targets = list(dict.fromkeys(r["target"] for r in result["rows"]))
    kinds = list(dict.fromkeys(r["case"].split(",")[0] for r in result["rows"]))

    def row(kind: str) -> tuple[Any, ...]:
        counts = []
        for target in targets:
            found = [r for r in result["rows"] if r["target"] == target and r["case"].split(",")[0] == kind]
            counts.append(f"{sum(r['error'] is None and r['bytes'] > 0 for r in found)} of {len(found)}")
        return f"`triton_{kind}`", *counts

    failed = [f"* `{r['target']}`, {r['case']}: {r['error']}" for r in result["rows"] if r["error"]]
    title = f"Triton {result['versions']['triton']}, {result['date']}, commit {result['commit']}; cases that compile:"
    table = _markdown(f"kernel |{'|'.join(targets)}", map(row, kinds))
    return "\n\n".join([title, table, *(["\n".join(failed)] if failed else [])])


def recipes_table(results: list[dict[str, Any]]) -> str:
    """Bundled recipes, and when to pick each."""
    (result,) = results

    def row(found: dict[str, Any]) -> tuple[Any, ...]:
        exam = found["exam"]
        return (
            f"`{found['recipe']}`", found["when"], f"{found['bits_per_weight']:.2f}", f"{found['file_bytes'] / 1e6:.2f}",
            f"{found['perplexity']['value']:.3f}", f"{100 * exam['value']:.1f}", _points(exam["difference"]),
        )  # fmt: skip

    def of_mixture(found: dict[str, Any]) -> tuple[Any, ...]:
        name, when, *rest = row(found)
        return f"{name}, of a mixture" if found["recipe"] == "float" else name, when, *rest

    head = "recipe |when to pick it |bits a weight|file, MB|perplexity|exam, %|difference, points [95 %]"
    rows = [*map(row, result["recipes"]), *map(of_mixture, result.get("mixtures", {"recipes": []})["recipes"])]
    return _markdown(head, iter(rows))


def rounders_table(results: list[dict[str, Any]]) -> str:
    """Rounders, and what each leaves of the bundled toy model."""
    (result,) = results

    def row(found: dict[str, Any]) -> tuple[Any, ...]:
        exam, far = found["exam"], found["divergence"]
        apart = ("", "") if far is None else (f"{far['kl']:.4f}", f"{100 * far['agreement']:.1f}")
        return (
            f"`{found['recipe']}`", f"{found['bits_per_weight']:.2f}", f"{found['perplexity']['value']:.3f}", *apart,
            f"{100 * exam['value']:.1f}", _points(exam["difference"]),
        )  # fmt: skip

    head = "recipe |bits a weight|perplexity|KL, nats|same token, %|exam, %|difference, points [95 %]"
    return _markdown(head, (row(found) for found in result["rounders"]))


def accuracy_recovery_table(results: list[dict[str, Any]]) -> str:
    """Answers to many questions, and what of round-to-nearest's loss is recovered."""
    (result,) = results

    def row(found: dict[str, Any]) -> tuple[Any, ...]:
        back = "" if found["recovered"] is None else f"{100 * found['recovered']:.0f}"
        return (
            f"`{found['recipe']}`", f"{found['bits_per_weight']:.2f}", f"{100 * found['value']:.1f}",
            _points(found["difference"]), back,
        )  # fmt: skip

    questions = f"{result['accuracy_recovery'][0]['n']:,} questions"
    return _markdown(
        f"recipe |bits a weight|{questions}, %|difference, points [95 %]|recovered, %", map(row, result["accuracy_recovery"])
    )


def mixed_table(results: list[dict[str, Any]]) -> str:
    """Two schemes of one method and what lies between them, beside the straight line; one model after the other."""

    def row(model: str, found: dict[str, Any]) -> tuple[Any, ...]:
        mixed = len([count for count in found["layers"].values() if count]) > 1
        taken = ", ".join(f"{count} `{scheme}`" for scheme, count in found["layers"].items() if count)
        below = (f"{found['line']:.4f}", f"{100 * (1 - found['kl'] / found['line']):.0f}") if mixed else ("", "")
        return model, taken, f"{found['bits_per_weight']:.3f}", f"{found['kl']:.4f}", *below

    rows = (row(result["model"], found) for result in results for found in result["mixed"])
    return _markdown("model |layers |bits a weight|KL, nats|straight line|below it, %", rows)


def quality_table(results: list[dict[str, Any]]) -> str:
    """Methods and peers on a real model, scheme by scheme."""
    (result,) = results
    most_rows = result["material"]["rows"]

    def row(found: dict[str, Any]) -> tuple[Any, ...]:
        far = found["divergence"]
        apart = ("", "") if far is None else (_nats(far["kl"]), f"{100 * far['agreement']:.1f}")
        is_lowbit = found["by"] in ("lowbit", "")
        fewer = f", {found['rows']} rows" if found.get("rows", most_rows) < most_rows else ""
        name = f"`{found['recipe']}`" if is_lowbit else f"{found['recipe']} ({found['by'].split()[-1]}{fewer})"
        return found["scheme"], name, f"{found['bits_per_weight']:.2f}", f"{found['perplexity']:.2f}", *apart

    head = "scheme |method |bits a weight|perplexity|KL, nats|same token, %"
    return _markdown(head, (row(found) for found in result["rows"]))


def symmetric_table(results: list[dict[str, Any]]) -> str:
    """Scales by two rules: decibels on weights, then what models lose."""
    (result,) = results
    by = {(r["bits"], r["group_size"], r["weights"]): r["db"] for r in result["weights"]}
    kinds = list(dict.fromkeys(r["weights"] for r in result["weights"]))

    def of_weights(bits: int, group: int) -> tuple[Any, ...]:
        found = [by[bits, group, kind] for kind in kinds]
        name = f"`int{bits}`, " + ("row" if group == -1 else f"group of {group}")
        return name, *(f"{db['absmax']:.1f} / {db['range']:.1f}" for db in found)

    def of_model(r: dict[str, Any]) -> tuple[Any, ...]:
        old, new = r["by"]["absmax"], r["by"]["range"]
        far = [found["divergence"] for found in (old, new)]
        return (
            r["model"], f"`{r['recipe']}`", f"{floats[r['model']]:.2f}", f"{old['perplexity']:.2f}", f"{new['perplexity']:.2f}",
            *(_nats(d["kl"]) for d in far), *(f"{100 * d['agreement']:.1f}" for d in far),
        )  # fmt: skip

    floats = {m["model"]: m["perplexity"] for m in result["materials"]}
    weights = _markdown("scheme |" + "|".join(kinds), (of_weights(*key) for key in dict.fromkeys(key[:2] for key in by)))
    head = "model |recipe |perplexity, float|absmax|range|KL, absmax|range|same token, %, absmax|range"
    return f"{weights}\n\n{_markdown(head, map(of_model, result['models']))}"


def quantizing_table(results: list[dict[str, Any]]) -> str:
    """Seconds of methods on one layer and on whole models, one device after the other."""
    return "\n\n".join(map(_quantizing_block, results))


def _quantizing_block(result: dict[str, Any]) -> str:
    def rows() -> Iterator[tuple[Any, ...]]:
        for found in result["rows"]:
            search = f"{found['rewrite']:.2f}" if "rewrite" in found else ""
            yield f"a layer of {found['n']} x {found['k']}", f"`{found['recipe']}`", search, f"{found['round']:.3f}"
        for found in result["models"]:
            yield (
                f"{found['model']}, {found['weights'] / 1e9:.2f} billion weights",
                f"`{found['recipe']}`",
                "",
                f"{found['seconds']:.1f}",
            )

    where = f"{', '.join(result['gpus']) or result['cpu']['name']}, torch {result['versions']['torch']}, {result['date']}."
    return f"{where}\n\n{_markdown('what |recipe |search, s|rounding, s', rows())}"


def _nats(kl: float | None) -> str:
    return "infinite" if kl is None else f"{kl:.4f}"


def _points(d: dict[str, Any] | None) -> str:
    """A difference of accuracies with its interval, in points."""
    return "" if d is None else f"{100 * d['difference']:+.1f} [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"


_SHOWN = (1, 8, 16, 64, 256, 2048)


def gemv_table(results: list[dict[str, Any]]) -> str:
    """Speeds of one machine after the other, each beside the limit of that run: the shape nearest to 8192 x 8192."""
    return "\n\n".join(map(_gemv_block, results))


def _shape_shown(result: dict[str, Any]) -> tuple[int, int]:
    return min({(r["n"], r["k"]) for r in result["rows"]}, key=lambda shape: (abs(shape[0] * shape[1] - 8192**2), shape))


def speed_table(results: list[dict[str, Any]]) -> str:
    """One row of x and some schemes in a line each: machines beside each other, where all kernels were free to run cold."""
    shown = [r for r in results if r.get("cold", True) and not r.get("kernels")]
    found = [{r["scheme"]: r for r in one["rows"] if (r["n"], r["k"]) == _shape_shown(one) and r["m"] == 1} for one in shown]

    def row(scheme: str) -> tuple[Any, ...]:
        row_by_m = [one[scheme] for one in found]
        return f"`{scheme}`", *(f"{r['times_float']:.1f} ({r['fraction_of_limit']:.2f})" for r in row_by_m)

    sizes = (f"{n} x {k}" for n, k in map(_shape_shown, shown))
    head = "scheme |" + "|".join(f"{one['device']}, {size}" for one, size in zip(shown, sizes, strict=True))
    return _markdown(head, (row(scheme) for scheme in _SUMMED_UP))


def _gemv_block(result: dict[str, Any]) -> str:
    n, k = _shape_shown(result)
    lowbit_rows = [{**r, "name": f"`{r['scheme']}`", "by": f"`{r['kernel']}`"} for r in result["rows"]]
    peer_rows = [{**r, "name": r["peer"], "by": r["version"]} for r in result.get("peers", ())]
    shown = [r for r in (*lowbit_rows, *peer_rows) if (r["n"], r["k"]) == (n, k)]
    batches = [m for m in _SHOWN if any(r["m"] == m for r in shown)]

    def row(name: str) -> tuple[Any, ...]:
        row_by_m = {r["m"]: r for r in shown if r["name"] == name}
        first = row_by_m[min(row_by_m)]
        ratios = (f"{row_by_m[m]['times_float']:.2f}" if m in row_by_m and row_by_m[m]["times_float"] else "" for m in batches)
        speed = f"{first['us']:.1f}", f"{first['billion_weights_per_second']:.0f}", f"{first['fraction_of_limit']:.2f}"
        return name, first["by"], *speed, *ratios

    suffix = "" if result.get("cold", True) else ", weights warm"
    suffix += f", {' and '.join(only)} alone" if (only := result.get("kernels")) else ""
    title = f"{result['device']}, {n} x {k}, {result['dtype']} x{suffix}, torch {result['versions']['torch']}, {result['date']}:"
    head = f"scheme |kernel at M = {min(batches)} |us|billion weights/s|of the limit"
    head += "".join(f"|times F.linear, M = {m}" for m in batches)
    return f"{title}\n\n{_markdown(head, (row(name) for name in dict.fromkeys(r['name'] for r in shown)))}"


def generate_table(results: list[dict[str, Any]]) -> str:
    """Tokens per second of whole models, one machine after the other."""
    return "\n\n".join(map(_generate_block, results))


def _generate_block(result: dict[str, Any]) -> str:
    def row(r: dict[str, Any]) -> tuple[Any, ...]:
        return (
            f"`{r['recipe']}`", f"{r['weight_bytes'] / 1e9:.2f}", f"{r['tokens_per_second']:.0f}", f"{r['times_float']:.2f}",
            f"{r['bandwidth_utilisation']:.2f}", f"{r['prefill_ms']:.1f}", f"{r['prefill_times_float']:.2f}",
        )  # fmt: skip

    sequences = f", {batch} sequences at once" if (batch := result.get("batch", 1)) > 1 else ""
    title = (
        f"{result['device']}, shapes of {result['model']} with random weights, head {result['head']}, behind {result['context']} "
        f"tokens{', `model.generate`' if result.get('plain') else ''}{sequences}, torch {result['versions']['torch']}, "
        f"{result['date']}:"
    )
    head = "recipe |weights, GB|tokens/s|times bf16|of the bandwidth|prompt of " + f"{result['prompt']}, ms|times bf16"
    return f"{title}\n\n{_markdown(head, map(row, result['rows']))}"


def decoding_table(results: list[dict[str, Any]]) -> str:
    """A model by ``model.generate``, apart and fused, beside llama.cpp, and where a token's time goes, machine by machine."""
    return "\n\n".join(map(_decoding_block, results))


def _decoding_block(result: dict[str, Any]) -> str:
    def row(r: dict[str, Any]) -> tuple[Any, ...]:
        times = f"{r['ms_per_token']:.1f}", f"{r['least_ms_per_token']:.1f}"
        return r["name"], f"{r['tokens_per_second']:.1f}", *times, f"{r['times_first']:.2f}", f"{r['prompt_ms']:.0f}"

    before, after = result["parts"]["before"], result["parts"]["after"]
    title = (
        f"{result['device']}, {result['model']}, behind {result['prompt']} tokens, memory of "
        f"{result['bytes_per_second'] / 1e9:.0f} GB/s, weights of {result['weight_bytes'] / 1e9:.2f} GB, "
        f"torch {result['versions']['torch']}, {result['date']}:"
    )
    rows = _markdown("model |tokens/s|ms a token|least|times the first|prompt, ms", map(row, result["rows"]))
    parts = ((name, f"{before[name]:.1f}", f"{after[name]:.1f}") for name in before)
    return f"{title}\n\n{rows}\n\n{_markdown('ms of a token |apart|fused', parts)}"


def triton_table(results: list[dict[str, Any]]) -> str:
    """Triton's kernels alone, in the blocks that are shipped, one GPU after the other."""
    return "\n\n".join(map(_triton_block, results))


def _triton_block(result: dict[str, Any]) -> str:
    found = {(r["n"], r["k"], r["scheme"], r["m"]): r for r in result["rows"]}
    batches = sorted({r["m"] for r in result["rows"]})

    def row(n: int, k: int, scheme: str) -> tuple[Any, ...]:
        row_by_m = [found[n, k, scheme, m] for m in batches]
        first = f"`{row_by_m[0]['kernel']}`", f"{row_by_m[0]['us']:.1f}", f"{row_by_m[0]['fraction_of_limit']:.2f}"
        return f"{n} x {k}", f"`{scheme}`", *first, *(f"{r['times_float']:.2f}" for r in row_by_m)

    title = f"{', '.join(result['gpus'])}, Triton alone, torch {result['versions']['torch']}, {result['date']}:"
    head = f"weight |scheme |kernel at M = {batches[0]} |us|of the limit" + "".join(f"|times F.linear, M = {m}" for m in batches)
    return f"{title}\n\n{_markdown(head, (row(*key) for key in dict.fromkeys(key[:3] for key in found)))}"


def host_table(results: list[dict[str, Any]]) -> str:
    """Eager calls with the host time of each, one machine after the other."""
    return "\n\n".join(map(_host_block, results))


def _host_block(result: dict[str, Any]) -> str:
    def row(r: dict[str, Any]) -> tuple[Any, ...]:
        return f"{r['n']} x {r['k']}", f"`{r['scheme']}`", f"{r['us']:.1f}", f"{r['host_us']:.1f}", f"{r['times_float']:.2f}"

    title = f"{result['device']}, one row of x, eager, {result['dtype']}, torch {result['versions']['torch']}, {result['date']}:"
    return f"{title}\n\n{_markdown('weight |scheme |us|host, us|times float', map(row, result['eager']))}"


def ecosystem_table(results: list[dict[str, Any]]) -> str:
    """What was tried with which library, and what came out."""
    (result,) = results

    def row(cell: dict[str, Any]) -> tuple[Any, ...]:
        what, _, refused = cell["what"].rpartition(": ")
        what, refused = (what, refused) if refused == "refused" else (cell["what"], "")
        outcome = (
            "fails" if cell["failed"] else "not run" if not cell["passed"] else "refused, with the remedy" if refused else "works"
        )
        version = result["packages"][LIBRARIES[cell["library"]]]
        return f"{cell['library']} {version}", what, outcome, cell["passed"], cell["skipped"]

    title = f"{result['date']}, commit {result['commit']}:"
    return f"{title}\n\n{_markdown('with |what |outcome |tests|skipped', map(row, result['cells']))}"


_SUMMED_UP = ("int8", "int4", "int4_sym", "int3", "fp8", "fp6", "nf4", "mxfp8", "mxfp4", "nvfp4")


def mixture_table(results: list[dict[str, Any]]) -> str:
    """Rounders, and what each leaves of the toy mixture of experts."""
    return rounders_table(results)


def experts_cpu_table(results: list[dict[str, Any]]) -> str:
    """One token through a layer of experts on a CPU: time, against the quickest way in bf16, and the share of the read limit."""
    (result,) = results
    quickest = min(row["us"] for row in result["rows"] if row["weights"] == "bf16")

    def row(found: dict[str, Any]) -> tuple[Any, ...]:
        return (
            f"`{found['weights']}`", f"`{found['implementation']}`", f"{found['bytes'] / 1e6:.1f}", f"{found['us'] / 1e3:.2f}",
            f"{quickest / found['us']:.2f}", f"{found['read_us'] / found['us']:.2f}",
        )  # fmt: skip

    head = "weights |implementation |chosen experts, MB|ms a token|times bf16's quickest|of the read limit"
    return _markdown(head, map(row, result["rows"]))


def experts_gpu_table(results: list[dict[str, Any]]) -> str:
    """A layer of experts on a GPU by tokens: microseconds, against the quickest way in bf16, and the share of the read limit."""
    (result,) = results
    tokens = sorted({row["tokens"] for rows in result["rows"].values() for row in rows})

    def cell(found: dict[str, Any]) -> str:
        share = f", {found['read_us'] / found['us']:.2f}" if found["tokens"] == 1 else ""
        return f"{found['us']:.0f} ({found['float_us'] / found['us']:.2f}{share})"

    def lines() -> Iterator[tuple[Any, ...]]:
        for model, rows in result["rows"].items():
            quickest = {m: min(row["us"] for row in rows if row["weights"] == "bf16" and row["tokens"] == m) for m in tokens}
            yield model, "`bf16`", *(f"{quickest[m]:.0f}" for m in tokens)
            for weights in dict.fromkeys(row["weights"] for row in rows if row["weights"] != "bf16"):
                by_tokens = {row["tokens"]: cell(row) for row in rows if row["weights"] == weights}
                yield model, f"`{weights}`", *(by_tokens.get(m, "") for m in tokens)

    return _markdown("experts of |weights |" + "|".join(f"{m:,}" for m in tokens), lines())


def few_rows_table(results: list[dict[str, Any]]) -> str:
    """How many rows of inputs rounders have to see before they err less than rounding to nearest."""
    (result,) = results
    head = "rounder |scheme |" + "|".join(f"{share:g} K" for share in result["shares"])

    def row(found: dict[str, Any]) -> tuple[Any, ...]:
        cells = (f"{mean:.2f} ({top:.2f})" for mean, top in zip(found["means"], found["largest"], strict=True))
        return f"`{found['rounder']}`", f"`{found['scheme']}`", *cells

    return _markdown(head, (row(found) for found in result["rows"]))


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "sqnr": sqnr_table,
    "demo": demo_table,
    "recipes": recipes_table,
    "mmlu": mmlu_table,
    "choosing": choosing_table,
    "rounders": rounders_table,
    "few_rows": few_rows_table,
    "mixture": mixture_table,
    "experts_cpu": experts_cpu_table,
    "experts_gpu": experts_gpu_table,
    "accuracy_recovery": accuracy_recovery_table,
    "mixed": mixed_table,
    "quality": quality_table,
    "symmetric": symmetric_table,
    "quantizing": quantizing_table,
    "gemv": gemv_table,
    "speed": speed_table,
    "summary": speed_table,
    "generate": generate_table,
    "decoding": decoding_table,
    "prompts": prompts_table,
    "gpu_targets": gpu_targets_table,
    "host": host_table,
    "triton": triton_table,
    "ecosystem": ecosystem_table,
}


SOURCES = {"speed": "gemv", "summary": "gemv", "choosing": "mmlu_h100"}
"""Tables whose figures go by another name."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Rewrite the tables of documents from the figures in a folder.")
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    texts = {path: path.read_text(encoding="utf-8") for path in options.documents}
    for name, table in TABLES.items():
        source = SOURCES.get(name, name)
        found = sorted(options.results.glob(f"{source}*.json"))
        if not found:
            raise SystemExit(f"{options.results} holds no {source}*.json")
        places = [path for path, text in texts.items() if f"<!-- {name}:begin -->" in text]
        if len(places) != 1:
            raise SystemExit(f"the table {name!r} must stand in one of the documents, found it in {len(places)}")
        block = table([json.loads(path.read_text(encoding="utf-8")) for path in found])
        texts[places[0]] = rewritten(texts[places[0]], name, block)
    for path, text in texts.items():
        replace_file(path, text)


if __name__ == "__main__":
    main()
