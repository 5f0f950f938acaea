"""``lowbit env`` and ``lowbit formats``."""

from __future__ import annotations

import math

from .console import JsonOption, print_json, print_table


def env(json: JsonOption = False) -> None:
    """Show versions, processor, GPUs, and which kernels can run here; for the others, what is missing and what brings it."""
    import lowbit

    found = lowbit.env()
    print_json(found.to_dict()) if json else print(found)


def formats(json: JsonOption = False) -> None:
    """List the number formats and the named schemes."""
    from lowbit import FORMATS, SCHEMES

    if json:
        listed = {
            name: {"bits": f.bits, "min": f.min, "max": f.max, "values": [v if math.isfinite(v) else str(v) for v in f.values]}
            for name, f in FORMATS.items()
        }
        print_json({"formats": listed, "schemes": {name: str(scheme) for name, scheme in SCHEMES.items()}})
        return
    from rich.table import Table

    numbers = Table("format", "bits", "numbers", "smallest", "largest", title="formats", title_justify="left")
    for name, f in FORMATS.items():
        finite = {value for value in f.values if math.isfinite(value)}
        numbers.add_row(name, str(f.bits), str(len(finite)), f"{f.min:g}", f"{f.max:g}")
    named = Table("scheme", "canonical name", "bits a weight (K = 4096)", title="schemes", title_justify="left")
    for name, scheme in SCHEMES.items():
        named.add_row(name, str(scheme), f"{scheme.bits_per_weight(4096):.3f}")
    print_table(numbers)
    print_table(named)
