"""``lowbit sensitivity`` and ``lowbit allocate``."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from .calibrating import CalibrationOption, LengthOption, RowsOption, check_calibration, read_calibration
from .console import JsonOption, ReportOption, bar, note, print_json, write_report
from .model_source import DeviceOption, check_model, load_model, parse_recipe, split
from .paths import file_to_read, file_to_write


def sensitivity(
    model: Annotated[str, typer.Argument(help="A folder or a hub id: a float model.")],
    schemes: Annotated[
        str, typer.Option("--schemes", "-s", help="What to try on each layer, with commas between: int3,int4 or gptq(int3).")
    ] = "int3,int4",
    calibration: CalibrationOption = None,
    rows: RowsOption = 128,
    length: LengthOption = None,
    compared: Annotated[
        int, typer.Option(min=0, help="Batches of that text on which predictions are compared, once for each layer and scheme.")
    ] = 8,
    layers: Annotated[str, typer.Option(help="Patterns of the layers to try, with commas between.")] = "*",
    device: DeviceOption = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Measure what each layer loses under each scheme, the others left as they are; --report FILE is what allocate reads."""
    wanted = [parse_recipe(name) for name in split(schemes)]
    if calibration is None:
        raise typer.BadParameter("sensitivity runs the model on a text: give one with --calibration FILE")
    check_calibration(wanted, calibration)
    check_model(model)
    import lowbit

    with bar() as progress:
        progress(f"loading {model}", 0, 1)
        data = read_calibration(model, calibration, rows, length)
        found = lowbit.sensitivity(
            load_model(model, device), data, split(schemes), compared=compared, layers=split(layers), progress=progress
        )
    write_report(found.to_dict(), report)
    print_json(found.to_dict()) if json else print(found)


def allocate(
    sensitivity: Annotated[
        Path, typer.Argument(metavar="FILE", help="What lowbit sensitivity --report FILE wrote.", callback=file_to_read)
    ],
    bits: Annotated[float, typer.Option(help="Bits a weight on average, scales counted.")] = 3.5,
    by: Annotated[str | None, typer.Option(help="The cost to add up: kl or error; kl where it was measured.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.yaml", help="Write the recipe there.", callback=file_to_write)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Choose a scheme for each layer: the least loss within a budget of bits, as a recipe to read, to edit and to quantize by."""
    import lowbit

    found = _read(sensitivity)
    try:
        mapping = lowbit.allocate(found, bits, by=by)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    bits_per_weight, loss, by = found.bits_per_weight(mapping), found.total(mapping, by), by or found.by
    words = f"{bits_per_weight:.4f} bits a weight, {by} of {loss:.4g} where losses of layers add up"
    head = f"# Mixed precision of lowbit allocate --bits {bits:g}: {words}.\n# Measured in {sensitivity.name}.\n"
    recipe = head + lowbit.Recipe.of(mapping).to_yaml()
    if out is not None:
        from lowbit.evals.results import replace_file

        replace_file(out, recipe)
        note(f"wrote {out}")
    if json:
        print_json({"bits_per_weight": bits_per_weight, "by": by, "loss": loss, "layers": mapping})
        return
    note(words)
    if out is None:
        print(recipe, end="")


def _read(path: Path) -> Any:
    import lowbit

    try:
        return lowbit.Sensitivity.from_dict(jsonlib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
