"""``lowbit doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from .calibrating import CalibrationOption, LengthOption, RowsOption, check_calibration, read_calibration
from .console import JsonOption, ReportOption, bar, print_json, write_report
from .model_source import DeviceOption, check_model, is_quantized, load_model


def doctor(
    quantized: Annotated[str, typer.Argument(help="A folder that lowbit quantize wrote.")],
    model: Annotated[str, typer.Argument(help="The float model that it was made from: a folder or a hub id.")],
    calibration: CalibrationOption = None,
    rows: RowsOption = 16,
    length: LengthOption = None,
    compared: Annotated[int, typer.Option(min=1, help="Batches of that text that both models run on.")] = 4,
    rewritten: Annotated[
        bool, typer.Option("--rewritten", help="A rewrite (awq, smoothquant, rotation) came before the rounding.")
    ] = False,
    device: DeviceOption = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Tell what the method lost from what is broken: a quantized model beside its float one, layer by layer.

    Without --calibration FILE the weights alone are looked at.
    """
    check_calibration([], calibration)
    check_model(quantized, floats=False)
    if not is_quantized(quantized):
        raise typer.BadParameter(f"{quantized} is no folder that lowbit quantize wrote: give the quantized model first")
    check_model(model)
    import lowbit

    with bar() as progress:
        progress("loading both models", 0, 1)
        data = read_calibration(model, calibration, rows, length)
        models = load_model(quantized, device), load_model(model, device)
        found = lowbit.doctor(*models, data, compared=compared, rewritten=rewritten or None, progress=progress)
    write_report(found.to_dict(), report)
    print_json(found.to_dict()) if json else print(found)
