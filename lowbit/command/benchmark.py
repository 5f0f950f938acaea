"""``lowbit bench``: speeds as fractions of what the hardware allows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import JsonOption, ReportOption, bar, note, print_json, print_table, write_report
from .model_source import check_model, checked_kind, load_model, parse_recipe, usable
from .paths import file_to_write, folder_to_write

bench = typer.Typer(help="Measure speed and memory against the machine's own limits.", no_args_is_help=True)


@bench.command("gemv")
def gemv(
    schemes: Annotated[
        str, typer.Option(help="Schemes or recipes with commas between; all: every one that a kernel is written for.")
    ] = "int8,int4,int4_sym,nf4,mxfp4",
    shapes: Annotated[
        str, typer.Option(help="N x K of the weights, with commas between; all: squares and a Llama's.")
    ] = "1024x1024,4096x4096,11008x4096",
    batches: Annotated[str, typer.Option(help="M, the rows of x, with commas between; all: 1 to 4096.")] = "1,8",
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=usable)] = "cpu",
    layout: Annotated[str, typer.Option(help="Of the weights: default (what quantize_ gives), or a layout's name.")] = "default",
    kernels: Annotated[str, typer.Option(help="Only these kernels of lowbit env, with commas between.")] = "",
    peers: Annotated[str, typer.Option(help="Also other libraries: their names with commas between, or all.")] = "",
    peer_seconds: Annotated[float, typer.Option(min=1, help="The most that the process of one of them may take.")] = 45,
    repeats: Annotated[int, typer.Option(min=1, help="Sweeps over all copies; each figure is their median.")] = 9,
    warm: Annotated[bool, typer.Option("--warm", help="Over one copy of the weights, which the cache may hold.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write NAME.json, NAME.csv and NAME.png there.", callback=folder_to_write),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the files in FOLDER.")] = "gemv",
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Weights loaded per second: every kernel beside F.linear and the limit of reading its bytes, in one run."""
    from lowbit.evals import figures, gemv
    from lowbit.evals import peers as peer_module
    from lowbit.evals.results import origin
    from lowbit_kernels import registry
    from lowbit_kernels.layouts import LAYOUTS

    try:
        sizes = gemv.SHAPES if shapes == "all" else [_shape(shape) for shape in shapes.split(",")]
        rows = gemv.BATCHES if batches == "all" else _counts(batches)
    except ValueError:
        raise typer.BadParameter(
            f"shapes are as in 4096x4096,1024x1024 and batches as in 1,8, got {shapes} and {batches}"
        ) from None
    _check_names("--layout", [] if layout == "default" else [layout], LAYOUTS)
    _check_names("--kernels", _names(kernels), {kernel.name for kernel in registry.kernels()})
    names = gemv.SCHEMES if schemes == "all" else _recipes(schemes)
    others = peer_module.peers_on(device) if peers == "all" else _names(peers)
    if unknown := set(others) - set(peer_module.peers_on(device)):
        raise typer.BadParameter(
            f"on {device} there are {', '.join(peer_module.peers_on(device))}, not {', '.join(sorted(unknown))}"
        )
    total, came_from = len(sizes) * len(rows) * (1 + len(names)) + len(others), origin()

    def keep(found: dict[str, Any]) -> None:
        if out is not None:
            figures.write_json(out, name, {**came_from, **found})

    with bar() as progress:
        done = iter(range(total))
        measured = gemv.measure(
            names, sizes, rows, device, repeats=repeats, layout=layout, others=others, seconds=peer_seconds,
            cold=not warm, kernels=_names(kernels),
            progress=lambda what: progress(what, next(done), total), keep=keep,
        )  # fmt: skip
    result = {**came_from, **measured}
    write_report(result, report)
    for failure in result["failures"]:
        note(" ".join(f"{key}={value}" for key, value in failure.items()))
    if out is not None and not figures.write(out, name, result):
        note("no drawing, because matplotlib is not installed: pip install 'lowbit[plot]'")
    print_json(result) if json else print_table(gemv.table(result))


def _check_names(option: str, names: Sequence[str], known: Collection[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{option} names {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _recipes(text: str) -> list[str]:
    """Names of recipes, each of which means something."""
    names = _names(text)
    for name in names:
        parse_recipe(name)
    return names


def _counts(text: str, mark: str = ",") -> list[int]:
    found = [int(part) for part in text.split(mark)]
    if min(found) < 1:
        raise ValueError("a count is at least 1")
    return found


def _shape(text: str) -> tuple[int, int]:
    n, k = _counts(text, "x")
    return n, k


@bench.command("generate")
def generate(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or shapes with random weights: llama-3-8b, llama-3.2-1b.")],
    recipes: Annotated[str, typer.Option(help="Recipes with commas between.")] = "int4,int8",
    head: Annotated[str, typer.Option(help="The scheme of the head; 'recipe' leaves it to the recipe.")] = "int8",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that are read at once.")] = 2048,
    context: Annotated[int, typer.Option(min=1, help="Tokens behind which others are written.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are written.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that are written to at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is done; figures are medians.")] = 3,
    compiled: Annotated[bool, typer.Option(help="On a GPU, compile the blocks, of the float model too.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Write through model.generate, its reading counted with it.")] = False,
    fused: Annotated[bool, typer.Option(help="Fuse quantized layers that read one tensor.")] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=usable)] = "cpu",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures there as JSON.", callback=file_to_write)
    ] = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Tokens per second of a whole model: each recipe beside the float model and the memory's bandwidth."""
    from lowbit.evals import generate as measuring
    from lowbit.evals.results import origin, write_result
    from lowbit.evals.shapes import SHAPES
    from lowbit.recipe import split_recipes

    names = [name for name in split_recipes(recipes) if name]
    for name in [*names, *([] if head == "recipe" else [head])]:
        parse_recipe(name)
    kind = None
    if model not in SHAPES:
        check_model(model, floats=bool(names))
        kind = checked_kind(model)  # or each recipe would fail for itself
    with bar() as progress:
        done = iter(range(len(names) + 1))
        measured = measuring.measure(
            model, names, device, prompt=prompt, context=context, steps=steps, batch=batch, repeats=repeats, compiled=compiled,
            fused=fused, plain=plain, head=None if head == "recipe" else head,
            load=lambda source, where: load_model(source, str(where), kind),
            progress=lambda what: progress(what, next(done), len(names) + 1),
            keep=None if out is None else lambda found: write_result(out, found),
        )  # fmt: skip
    result = {**origin(), **measured}
    write_report(result, report)
    for failure in result["failures"]:
        note(" ".join(f"{key}={value}" for key, value in failure.items()))
    if not result["rows"]:
        raise ValueError(f"nothing of {model} could be measured: {result['failures'][0]['error']}")
    print_json(result) if json else print_table(measuring.table(result))


@bench.command("host")
def host(
    schemes: Annotated[str, typer.Option(help="Schemes or recipes with commas between.")] = "int4,int8",
    batches: Annotated[str, typer.Option(help="M, the rows of x, with commas between.")] = "1,16",
    size: Annotated[
        int, typer.Option(min=1, help="Rows and columns of each weight: small, so that the device never lags.")
    ] = 256,
    shapes: Annotated[
        str, typer.Option(help="N x K of cold weights whose eager calls are measured too, as in 4096x4096, commas between.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=usable)] = "cpu",
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Host time of a call: what Python, the dispatcher and the launch take beside the kernel, next to a float layer's."""
    from lowbit.evals import eager, host_time
    from lowbit.evals.results import origin

    try:
        rows, sizes = _counts(batches), [_shape(shape) for shape in shapes.split(",") if shape]
    except ValueError:
        raise typer.BadParameter(f"batches are as in 1,8 and shapes as in 4096x4096, got {batches} and {shapes}") from None
    result = {**origin(), **host_time.measure(_recipes(schemes), size, rows, device)}
    result["eager"] = eager.measure(_recipes(schemes), sizes, device)
    write_report(result, report)
    if json:
        print_json(result)
        return
    print_table(host_time.table(result))
    if sizes:
        print_table(eager.table(result["eager"]))


@bench.command("memory")
def memory(
    scheme: Annotated[str, typer.Option(help="The scheme that each layer is quantized to.")] = "int4",
    size: Annotated[int, typer.Option(min=1, help="Rows and columns of each layer.")] = 4096,
    layers: Annotated[int, typer.Option(min=1, help="How many layers the model has.")] = 8,
    json: JsonOption = False,
) -> None:
    """Peak memory over the model itself while it is quantized; twice its largest layer is the promise."""
    from lowbit.evals.memory import peak_over_model

    parse_recipe(scheme)
    found = peak_over_model(scheme, size, layers)
    if json:
        print_json(found)
        return
    over, times = found["over_model_bytes"] / 1e6, found["times_largest_layer"]
    print(f"{over:.1f} MB over the model at the peak, {times:.2f} times its largest layer (the promise is 2)")
