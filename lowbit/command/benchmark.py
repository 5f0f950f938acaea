"""``lowbit bench``: speeds as fractions of what the hardware allows."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import JsonOption, ReportOption, bar, print_json, print_table, write_report

bench = typer.Typer(help="Measure speed and memory against the machine's own limits.", no_args_is_help=True)


@bench.command("gemv")
def gemv(
    schemes: Annotated[str, typer.Option(help="Schemes with commas between.")] = "int8,int4,int4_sym,nf4,mxfp4",
    shapes: Annotated[str, typer.Option(help="N x K of the weights, with commas between.")] = "1024x1024,4096x4096,11008x4096",
    batches: Annotated[str, typer.Option(help="Rows of x, with commas between.")] = "1,8",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Walks over all copies; each figure is their median.")] = 9,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Weights loaded per second: every kernel beside F.linear and the limit of reading its bytes, in one run."""
    try:
        sizes = [(int(n), int(k)) for n, k in (shape.strip().split("x") for shape in shapes.split(","))]
        rows = [int(m) for m in batches.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"shapes are as in 4096x4096,1024x1024 and batches as in 1,8, got {shapes} and {batches}"
        ) from None
    import torch

    from lowbit.evals import gemv as benchmark
    from lowbit.evals.results import origin

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device: use --device cpu")
    names = [name.strip() for name in schemes.split(",")]
    total = len(sizes) * len(rows) * (1 + len(names))
    with bar() as progress:
        done = iter(range(total))
        figures = benchmark.measure(
            names, sizes, rows, device, repeats=repeats, progress=lambda what: progress(what, next(done), total)
        )
    result = {**origin(), **figures}
    write_report(result, report)
    print_json(result) if json else print_table(benchmark.table(figures))


@bench.command("memory")
def memory(
    scheme: Annotated[str, typer.Option(help="The scheme that each layer is quantized to.")] = "int4",
    size: Annotated[int, typer.Option(min=1, help="Rows and columns of each layer.")] = 4096,
    layers: Annotated[int, typer.Option(min=1, help="How many layers the model has.")] = 8,
    json: JsonOption = False,
) -> None:
    """Peak memory over the model itself while it is quantized; twice its largest layer is the promise."""
    from lowbit.evals.memory import peak_over_model

    found = peak_over_model(scheme, size, layers)
    if json:
        print_json(found)
        return
    over, times = found["over_model_bytes"] / 1e6, found["times_largest_layer"]
    print(f"{over:.1f} MB over the model at the peak, {times:.2f} times its largest layer (the promise is 2)")
