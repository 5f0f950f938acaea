"""``lowbit plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import JsonOption, print_json
from .model_source import DeviceOption, check_model, outline, parse_recipe


def plan(
    model: Annotated[str, typer.Argument(help="A folder or a hub id.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A scheme, a recipe or a YAML file.")] = "int4",
    device: DeviceOption = None,
    layers: Annotated[bool, typer.Option("--layers", help="A line for each layer, not one for all that are alike.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what quantizing would do to each layer, and which kernels will run. Reads no weights.

    For example: lowbit plan MODEL --recipe "gptq(int4)" --device cuda
    """
    parsed = parse_recipe(recipe)
    check_model(model)
    import torch

    import lowbit

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = lowbit.plan(outline(model), parsed, device=where)
    print_json(found.to_dict()) if json else print(found if layers else found.summary())
