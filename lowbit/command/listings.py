"""``lowbit env`` and ``lowbit list``."""

from __future__ import annotations

import inspect
import math
from typing import Annotated, Any

import typer

from .console import JsonOption, print_json, print_table

listing = typer.Typer(help="List what there is by name: formats, schemes, recipes, methods, kernels.", no_args_is_help=True)


def env(
    kernels: Annotated[bool, typer.Option("--kernels", help="Each kernel, and what is missing for it.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what runs here: versions, processor, GPUs, and how many kernels are ready; for the others, what brings them."""
    import lowbit

    found = lowbit.env()
    if json:
        print_json(found.to_dict())
    else:
        print(found.details() if kernels else found)


@listing.command("formats")
def formats(json: JsonOption = False) -> None:
    """List the number formats."""
    from lowbit import FORMATS

    if json:
        print_json(
            {
                name: {
                    "bits": f.bits,
                    "min": f.min,
                    "max": f.max,
                    "values": [v if math.isfinite(v) else str(v) for v in f.values],
                }
                for name, f in FORMATS.items()
            }
        )
        return
    from rich.table import Table

    numbers = Table("format", "bits", "numbers", "smallest", "largest")
    for name, f in FORMATS.items():
        finite = {value for value in f.values if math.isfinite(value)}
        numbers.add_row(name, str(f.bits), str(len(finite)), f"{f.min:g}", f"{f.max:g}")
    print_table(numbers)


@listing.command("schemes")
def schemes(json: JsonOption = False) -> None:
    """List the named schemes: what --recipe takes, and the canonical name in files."""
    from lowbit import SCHEMES

    if json:
        print_json({name: {"scheme": str(s), "bits_per_weight": s.bits_per_weight(4096)} for name, s in SCHEMES.items()})
        return
    from rich.table import Table

    named = Table("scheme", "canonical name", "bits a weight (K = 4096)")
    for name, scheme in SCHEMES.items():
        named.add_row(name, str(scheme), f"{scheme.bits_per_weight(4096):.3f}")
    print_table(named)


@listing.command("recipes")
def recipes(json: JsonOption = False) -> None:
    """List the recipes that come with the library, and when to pick each."""
    from lowbit.evals.recipes import names, when

    found = {name: when(name) for name in names()}
    if json:
        print_json(found)
        return
    from rich.table import Table

    table = Table("recipe", "when to pick it")
    for name, text in found.items():
        table.add_row(name, text)
    print_table(table)


@listing.command("methods")
def methods(json: JsonOption = False) -> None:
    """List rounders and rewrites with their options and defaults: gptq(int4, damping=0.02)."""
    found = _methods()
    if json:
        print_json(found)
        return
    from rich.table import Table

    table = Table("method", "kind", "data", "options")
    for name, one in found.items():
        options = ", ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in one["options"].items()
        )
        table.add_row(name, one["kind"], one["data"], options)
    print_table(table)


@listing.command("kernels")
def kernels(json: JsonOption = False) -> None:
    """List the kernels, in order of preference, and what is missing for those that cannot run here."""
    import lowbit

    rows = lowbit.env().to_dict()["kernels"]
    if json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table("kernel", "operator", "here")
    for row in rows:
        table.add_row(row["name"], row["op"], "on request" if row["on_request"] else row["missing"] or "ready")
    print_table(table)


def _methods() -> dict[str, dict[str, Any]]:
    from lowbit.algorithms import ROUNDERS
    from lowbit.rewrites import REWRITES

    found = {}
    for name, rounder in ROUNDERS.items():
        data = "needed" if rounder.needs_statistics else "used" if rounder.uses_statistics else "not used"
        found[name] = {"kind": "rounder", "data": data, "options": _options(rounder.round)}
    for name, method in REWRITES.items():
        data = "needed" if method.needs_data else "used"
        found[name] = {"kind": "rewrite", "data": data, "options": _options(method.run)}
    return found


def _options(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
