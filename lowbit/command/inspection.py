"""``lowbit inspect``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from lowbit.checkpoint.header import Entry, Header
    from lowbit.checkpoint.tensor_file import Spec


def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE_OR_FOLDER", help="What lowbit wrote.", exists=True)],
    json: JsonOption = False,
) -> None:
    """Show what a quantized checkpoint holds: scheme, bits a weight and bytes of each layer. Reads no weights."""
    header, specs, files = _opened(path)
    data = _described(path, header, specs, files)
    print_json(data) if json else _print(data)


def _opened(path: Path) -> tuple[Header, dict[str, Spec], list[Path]]:
    """The header, the tensors and the files of a folder, or of one of its files."""
    from lowbit.checkpoint.header import Header
    from lowbit.checkpoint.shards import open_files, present_specs
    from lowbit.checkpoint.tensor_file import TensorFile

    if path.is_dir():
        with open_files(path) as found:
            return found.header, found.specs, [file.path for file in found.files]
    file = TensorFile(path)
    try:
        header = Header.parse(file.metadata, str(path))
        return header, present_specs(file, header), [path]
    finally:
        file.close()


def _described(path: Path, header: Header, specs: dict[str, Spec], files: list[Path]) -> dict[str, Any]:
    from lowbit.checkpoint import CheckpointError

    quantized = {name: entry for name, entry in header.quantized.items() if entry.names(name)["packed"] in specs}
    layers = [_layer(name, entry) for name, entry in quantized.items()]
    parts = {stored for name, entry in quantized.items() for stored in entry.names(name).values()}
    for name, entry in quantized.items():
        for part, spec in entry.parts().items():
            stored = entry.names(name)[part]
            if (found := specs.get(header.aliases.get(stored, stored), spec)) != spec:  # of a shard others hold the rest
                raise CheckpointError(f"{path}: {stored} is {found}, and the header says {spec}: cut short or altered")
    weights = sum(math.prod(layer["shape"]) for layer in layers)
    size = sum(layer["bytes"] for layer in layers)
    return {
        "path": str(path),
        "version": header.version,
        "model": header.model,
        "files": {file.name: file.stat().st_size for file in files},
        "quantized_layers": len(layers),
        "quantized_bytes": size,
        "bits_per_weight": 8 * size / max(weights, 1),
        "other_tensors": len(specs.keys() - parts),
        "other_bytes": sum(spec.nbytes for name, spec in specs.items() if name not in parts),
        "aliases": header.aliases,
        "layers": layers,
    }


def _layer(name: str, entry: Entry) -> dict[str, Any]:
    size = sum(spec.nbytes for spec in entry.parts().values())
    return {
        "name": name,
        "kind": entry.kind,
        "scheme": str(entry.scheme),
        "activation": None if entry.activation is None else str(entry.activation),
        "shape": list(entry.shape),
        "dtype": str(entry.dtype).removeprefix("torch."),
        "bits_per_weight": 8 * size / max(math.prod(entry.shape), 1),
        "bytes": size,
    }


def _print(data: dict[str, Any]) -> None:
    from rich.table import Table

    from lowbit.layer_groups import grouped

    table = Table("layer", "kind", "shape", "scheme")
    table.add_column("bits", justify="right")
    table.add_column("bytes", justify="right")

    def alike(layer: dict[str, Any]) -> tuple[Any, ...]:
        return layer["kind"], tuple(layer["shape"]), layer["scheme"], layer["activation"]

    for name, group in grouped(data["layers"], lambda layer: str(layer["name"]), alike):
        layer, count = group[0], f"{len(group)} x " if len(group) > 1 else ""
        scheme = layer["scheme"] + ("" if layer["activation"] is None else f", x {layer['activation']}")
        shape = count + "x".join(map(str, layer["shape"]))
        size = sum(one["bytes"] for one in group)
        table.add_row(name, layer["kind"], shape, scheme, f"{layer['bits_per_weight']:.3f}", f"{size:,}")
    model = data["model"].get("class", "a model")
    print(f"{data['path']}: {model}, version {data['version']} of the format")
    for name, size in data["files"].items():
        print(f"  {name}: {size:,} bytes")
    print_table(table)
    print(
        f"{data['quantized_layers']} quantized layers, {data['quantized_bytes']:,} bytes, {data['bits_per_weight']:.3f} bits a "
        f"weight; {data['other_tensors']} other tensors, {data['other_bytes']:,} bytes"
    )
    for name, first in data["aliases"].items():
        print(f"{name} is {first}")
