"""The residual stream of a model, found by running it once: which layers write to it, which norms read it, and which layers
read those norms. No architecture is known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.blocks import call
from ..calibration.data import Batch
from ..calibration.pytree import tree_leaves
from ..layers import layer_kind
from .norms import Norm
from .residual_graph import ModuleInput, ModuleOutput, ResidualGraph, TensorOrigin

__all__ = ["ResidualStream", "find_residual_stream"]


@dataclass
class ResidualStream:
    """A residual stream of ``width`` channels.

    Attributes:
        norms: those that read it, by name.
        readers: by the name of each module with a weight the norm whose output it reads, ``""`` where it reads the stream.
        writers: by name the places, among the leaves of what it gives, of what is added to the stream.
        rowwise: writers whose input comes from other layers token by token: down projections, and no attention.
        guessed: modules that nothing reached, taken for what those are whose names differ in one number.
        calls: what a module was called with that is no plain layer: a router, experts in one tensor, an embedding that scales.
    """

    width: int = 0
    norms: dict[str, Norm] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    writers: dict[str, set[int]] = field(default_factory=dict)
    rowwise: set[str] = field(default_factory=set)
    guessed: list[str] = field(default_factory=list)
    calls: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def centres(self) -> bool:
        """Whether its norms take the mean away."""
        return any(norm.centres for norm in self.norms.values())


def find_residual_stream(model: nn.Module, batch: Batch, device: torch.device | None = None) -> ResidualStream:
    """The residual stream of ``model`` as a run on ``batch``, moved to ``device``, shows it.

    Raises ``ValueError`` that names a module where there is none, or one that no rotation can pass.
    """
    graph = ResidualGraph(model)
    with graph.recording(), torch.inference_mode(False), torch.enable_grad():
        output = call(model, batch, device)
        ends = [graph.origins(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return _assemble(graph, ends)


def _assemble(graph: ResidualGraph, ends: list[dict[ModuleOutput, TensorOrigin]]) -> ResidualStream:
    stream = ResidualStream(calls=graph.calls)
    writers = _writers(graph, stream)
    _check_norms(graph, stream, writers)
    for module_input in graph.inputs:
        if module_input.name not in stream.norms:
            _add_reader(stream, module_input, writers)
        if not _is_rowwise(graph, module_input):
            stream.rowwise.discard(module_input.name)
    for origins in ends:
        if outputs_in_basis := [
            output_place.name for output_place in origins if output_place.name in stream.norms or output_place in writers
        ]:
            raise ValueError(
                f"the model gives what {outputs_in_basis[0]} gives, in the basis of the residual stream: rotation needs a model "
                f"whose "
                "output a layer computes, such as one with its head"
            )
    _guess(graph, stream)
    return stream


def _is_rowwise(graph: ResidualGraph, module_input: ModuleInput) -> bool:
    """Whether a single layer reads, token by token, what other layers give: a down projection."""
    layers = {name for name, module in graph.sources.items() if layer_kind(module) is not None} - graph.embeddings
    output_places = {output_place.name for output_place in module_input.origins}
    return (
        bool(output_places)
        and output_places | {module_input.name} <= layers
        and all(origin.rowwise for origin in module_input.origins.values())
    )


def _writers(graph: ResidualGraph, stream: ResidualStream) -> set[ModuleOutput]:
    """Everything that reaches a norm together with an embedding; ``stream`` learns of the norms and of the writers."""
    writers: set[ModuleOutput] = set()
    for module_input in graph.inputs:
        if module_input.name not in graph.norms:
            continue
        if not any(output_place.name in graph.embeddings or output_place in writers for output_place in module_input.origins):
            continue
        stream.norms[module_input.name] = graph.norms[module_input.name]
        if stream.width not in (0, module_input.width):
            raise ValueError(
                f"{module_input.name} reads a stream of {module_input.width} channels, and others one of {stream.width}"
            )
        stream.width = module_input.width
        for output_place, origin in module_input.origins.items():
            if origin.width != module_input.width:
                continue  # a factor of what a layer adds, such as the share of an expert
            if not origin.parallel:
                raise ValueError(
                    f"what {output_place.name} gives reaches the stream in front of {module_input.name} otherwise than by being "
                    f"added: "
                    "rotation has no way through it"
                )
            writers.add(output_place)
    if not writers:
        raise ValueError("no residual stream was found: no norm reads what an embedding gives, and layers add to")
    for output_place in writers:
        stream.writers.setdefault(output_place.name, set()).add(output_place.place)
    called = {module_input.name for module_input in graph.inputs}
    stream.rowwise = {name for name in stream.writers if name in called}
    return writers


def _check_norms(graph: ResidualGraph, stream: ResidualStream, writers: set[ModuleOutput]) -> None:
    norm_written = next((output_place.name for output_place in writers if output_place.name in graph.norms), None)
    if norm_written is not None:
        raise ValueError(
            f"{norm_written} is a norm whose output is added to the residual stream: its gain belongs to the channels, which a "
            "rotation mixes, and no layer behind it could take it"
        )
    if len({norm.centres for norm in stream.norms.values()}) > 1:
        raise ValueError("some norms of the residual stream take the mean away and others do not: rotation cannot serve both")


def _add_reader(stream: ResidualStream, module_input: ModuleInput, writers: set[ModuleOutput]) -> None:
    origins = {output_place: origin for output_place, origin in module_input.origins.items() if origin.width == stream.width}
    norms = {output_place.name for output_place in origins if output_place.name in stream.norms}
    direct = writers & origins.keys()
    if not norms and not direct:
        return
    norm_read = next(iter(norms)) if norms else ""
    if len(norms) > 1 or (norms and len(origins) > 1) or (direct and direct != origins.keys()):
        names = ", ".join(sorted({output_place.name for output_place in origins})[:4])
        raise ValueError(
            f"{module_input.name} reads what {names} give together, a norm and others: rotation has no way through it"
        )
    if not all(origin.parallel for origin in origins.values()):
        source = f"what {norm_read} gives" if norm_read else "the residual stream"
        raise ValueError(f"{module_input.name} reads {source} through something that is no product with one number a token")
    if stream.readers.setdefault(module_input.name, norm_read) != norm_read:
        raise ValueError(
            f"{module_input.name} reads {stream.readers[module_input.name] or 'the stream'} and {norm_read or 'the stream'}"
        )
    if not norm_read and stream.centres:
        raise ValueError(
            f"{module_input.name} reads the residual stream past its norms, which take its mean away and it does not"
        )


def _guess(graph: ResidualGraph, stream: ResidualStream) -> None:
    """Experts that no token reached are what the others are."""
    reached_names = {module_input.name for module_input in graph.inputs} | stream.writers.keys()
    for name, module in graph.sources.items():
        if name in reached_names or layer_kind(module) == "embedding":
            continue
        numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", name))
        if not numbers:
            continue
        # The last number is the expert's; those before it are a block's, each of which has norms of its own.
        place = numbers[-1]
        same_pattern = re.compile(re.escape(name[: place.start()]) + r"\d+" + re.escape(name[place.end() :]))
        roles = {
            (stream.readers.get(other), frozenset(stream.writers.get(other, ())), other in stream.rowwise)
            for other in reached_names
            if same_pattern.fullmatch(other)
        }
        is_inside = any(norm_read is not None and norm_read.startswith(name[: place.start()]) for norm_read, _, _ in roles)
        if len(roles) != 1 or is_inside:
            continue
        norm_read, written, rowwise = roles.pop()
        if norm_read is not None:
            stream.readers[name] = norm_read
        if written:
            stream.writers[name] = set(written)
        if rowwise:
            stream.rowwise.add(name)
        stream.guessed.append(name)
