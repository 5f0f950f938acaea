"""``lowbit quantize``."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .calibrating import CalibrationOption, LengthOption, RowsOption, check_calibration, read_calibration
from .console import JsonOption, bar, note, print_json
from .model_source import DeviceOption, check_model, is_quantized, load_model, load_tokenizer, parse_recipe, usage_errors
from .paths import folder_to_write

if TYPE_CHECKING:
    from lowbit import Calibration, Recipe
    from lowbit.plans import LayerPlan, Plan


def _size(text: str | None) -> str | None:
    if text is not None:
        from lowbit.streaming.budget import parse_bytes

        try:
            parse_bytes(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def quantize(
    model: Annotated[str, typer.Argument(help="A folder or a hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the quantized model goes.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A scheme, a recipe or a YAML file.")] = "int4",
    calibration: CalibrationOption = None,
    rows: RowsOption = 128,
    length: LengthOption = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Work from disk to disk, a block at a time, within this much memory: 8GB.", callback=_size
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Work from disk to disk, and go on with what an interrupted run left here."),
    ] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Quantize a model and write it with its configuration and tokenizer: lowbit.load(FOLDER) is ready to use.

    Under torchrun the processes share the work.
    """
    parsed = parse_recipe(recipe)
    check_model(model)
    _check_output(output, model)
    check_calibration([parsed], calibration)
    streamed = max_memory is not None or resume is not None
    if streamed and (calibration is None or not Path(model).is_dir()):
        raise typer.BadParameter("--max-memory and --resume take a model in a folder, and --calibration FILE")
    start = time.perf_counter()
    with bar() as progress, group() as first:
        data = read_calibration(model, calibration, rows, length)

        def on_layer(layer: LayerPlan, done: int, total: int) -> None:
            progress(layer.name if layer.loss is None else f"{layer.name} ({layer.loss:.1e})", done, total)

        if streamed:
            from lowbit import quantize_folder

            with usage_errors():
                plan = quantize_folder(
                    model,
                    output,
                    parsed,
                    calibration=data,
                    max_memory=max_memory,
                    resume=resume,
                    device=device,
                    progress=on_layer,
                )
        else:
            plan = _in_memory(model, output, parsed, data, device, on_layer, progress, first)
    if not first:
        return
    files = sorted(path for path in output.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    seconds = time.perf_counter() - start
    if json:
        print_json({"output": str(output), "file_bytes": size, "seconds": seconds, "plan": plan.to_dict()})
    else:
        for text in (*plan.notes, *(f"{layer.name}: {note}" for layer in plan.layers for note in layer.notes)):
            note(text)
        print(str(plan).splitlines()[-1])
        print(_loss(plan))
        print(f"{output}: {size:,} bytes in {len(files)} file{'s' if len(files) > 1 else ''}, {seconds:.1f} s")


def _loss(plan: Plan) -> str:
    """What rounding cost, as far as it was measured."""
    known = [layer for layer in plan.quantized if layer.loss is not None]
    if not known:
        return "loss not measured: --calibration FILE measures that of each layer, lowbit eval that of the model"
    losses = [layer.loss for layer in known if layer.loss is not None]
    worst = max(known, key=lambda layer: layer.loss or 0.0)
    return (
        f"loss of {len(known)} layers, squared error of outputs over their square: median {statistics.median(losses):.1e}, "
        f"largest {max(losses):.1e} in {worst.name}"
    )


def _in_memory(
    model: str,
    output: Path,
    parsed: Recipe,
    data: Calibration | None,
    device: str | None,
    on_layer: Any,
    progress: Any,
    first: bool,
) -> Plan:
    import lowbit

    progress(f"loading {model}", 0, 1)
    loaded = load_model(model)
    plan = lowbit.quantize_(loaded, parsed, calibration=data, device=device, progress=on_layer)
    progress(f"writing {output}", 0, 1)
    if first:
        lowbit.save(loaded, output, beside=_tokenizer_writer(model, output))
    return plan


@contextlib.contextmanager
def group() -> Iterator[bool]:
    """Within the block the processes that torchrun started know each other; whether this is the first, or alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield True
        return
    from torch import distributed

    distributed.init_process_group("gloo")
    try:
        yield distributed.get_rank() == 0
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _check_output(output: Path, model: str) -> None:
    """Refuse a folder whose files are not ours to replace."""
    folder_to_write(output)
    if output.is_dir() and any(output.iterdir()) and (output.samefile(model) if Path(model).exists() else False):
        raise typer.BadParameter(f"{output} is the model itself: give another folder with -o")
    if output.is_dir() and any(output.iterdir()) and not is_quantized(str(output)):
        raise typer.BadParameter(f"{output} holds files that lowbit did not write: give a new folder with -o")


def _tokenizer_writer(model: str, output: Path) -> Callable[[Path], None] | None:
    """What writes the model's tokenizer into a folder; None, and a remark, for a model that has none."""
    try:
        tokenizer = load_tokenizer(model)
    except ValueError as error:
        note(f"no tokenizer beside the weights ({str(error)[:200]})")
        return None

    def write(folder: Path) -> None:
        try:
            tokenizer.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # the library of tokenizers has no kinds of errors
            raise OSError(f"{output}: the tokenizer could not be written: {error}") from error

    return write
