"""Calibrating: a model is quantized block by block, each on what the quantized blocks before it give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..expert_rounding import RoundedExpert
from ..layers import Layer, tied_groups
from ..plans import LayerPlan
from ..recipe import block_counts
from ..replacement import InputStatistics, Replacement, moved
from ..rewrites.rescaling import Rescaler, sealed
from ..rounding import RoundedWeight
from ..torch_state import default_device
from .activation_store import ActivationStore, BlockInputs
from .blocks import BlockStructure, call, children, find_stacks
from .capture import Arguments, Constants, capture_block_inputs
from .collection import Collector, InputsDivergedError, expert_key
from .data import Batch
from .eval_mode import eval_mode
from .expert_inputs import Experts
from .float_block import FloatBlock, in_dtypes
from .offload import BlockOffload, onload_blocks
from .padding import Padding
from .pytree import tree_leaves
from .ranks import Ranks
from .topo_order import topological_levels

if TYPE_CHECKING:
    from ..rewrite import Rewrite

__all__ = ["Calibrator"]

NO_BLOCKS = "no stack of blocks was found: calibrated as one block, the whole model"


class Calibrator:
    """Quantizes the layers of a model with statistics of their inputs.

    For each block: its inputs are what the blocks before it, quantized, gave; one run over them collects the statistics of
    its layers, which are then rewritten, rounded and replaced; a second run gives the next block's inputs. No activation of more
    than one block is kept. Where a rounder looks at how far inputs drifted from those of the float model, a float copy of the
    block runs beside it, on what the float blocks before gave, and its layers are seen to in the order in which they read each
    other. Embeddings come first, without data; what else stands outside of blocks comes last, in a run of the
    whole model.

    ``statistics_bytes``: bytes that the statistics of a block may take at a time, None for any; only for one process without
    ``rewrites``, which look at all of a block's statistics at once.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[LayerPlan],
        layers: list[Layer],
        batches: Sequence[Batch],
        replacement: Replacement,
        offload: BlockOffload,
        states: ActivationStore,
        rewrites: Sequence[Rewrite] = (),
        statistics_bytes: int | None = None,
    ) -> None:
        self.notes: list[str] = []
        self._model, self._batches, self._replacement = model, batches, replacement
        self._offload, self._states, self._ranks = offload, states, Ranks()
        self._local_batches = self._ranks.shard(len(batches))
        self._names = [entry.name for entry in entries]
        self._padding = Padding(model)
        self._modules = {i: layer.module for i, layer in enumerate(layers) if entries[i].config is not None}
        self._with_statistics = {i for i, layer in enumerate(layers) if layer.kind in ("linear", "conv1d")}
        self._experts = {
            i: Experts(layer.module, layer.attribute, layer.transposed)
            for i, layer in enumerate(layers)
            if layer.kind == "experts"
        }
        self._ties = [group for group in tied_groups(layers) if any(i in self._modules for i in group)]
        self._statistics_bytes = statistics_bytes
        self._rescaler: Rescaler | None = None
        if rewrites:
            self._rescaler = Rescaler(
                rewrites, model, entries, layers, sealed(model), self._ranks, replacement.quantizes, offload.trim
            )
        self._stacks = block_counts(name for layer in layers for name in layer.names)

    def run(self) -> None:
        """Do all of it; ``notes`` then say what there is to know of the model as a whole."""
        candidates = [path for name in self._stacks for path in children(self._model, name)]
        for path in candidates:
            self._restore(path)
        with eval_mode(self._model):
            with onload_blocks(self._model, self._offload, candidates):
                found = find_stacks(self._model, self._stacks, self._batches[0], self._offload.device)
            self.notes += found.notes
            if not found.stacks:
                self.notes.append(NO_BLOCKS)
            block_of_layer = self._blocks_of_layers(found)
            tied = {i for group in self._ties for i in group}
            tables = [i for i, module in self._modules.items() if isinstance(module, nn.Embedding) and i not in tied]
            if tables:
                with self._offload.outside(candidates):
                    for i in tables:
                        self._replace_layer(i, None)
            for stack in range(len(found.stacks)):
                self._calibrate_stack(found, stack, block_of_layer)
            self._calibrate_remaining([path for stack in found.stacks for path in stack.paths])

    def _blocks_of_layers(self, found: BlockStructure) -> dict[int, str]:
        """The block of each layer that can be quantized with it: one whose weight no layer elsewhere reads."""
        block_of_layer = {i: found.block_of(self._names[i]) for i in self._modules}
        for group in self._ties:
            if len({block_of_layer.get(i) for i in group}) > 1:
                block_of_layer.update(dict.fromkeys(group))
        return {i: block for i, block in block_of_layer.items() if block is not None}

    def _replace_layer(self, i: int, statistics: InputStatistics) -> None:
        self._replacement.apply(i, statistics, calibrated=True)
        del self._modules[i]

    def _restore(self, path: str) -> None:
        """Take over a block that an earlier run finished."""
        for name, done in self._offload.restore(path).items():
            i = self._names.index(name)
            self._replacement.mark_completed(i, done)
            del self._modules[i]

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _calibrate_stack(self, found: BlockStructure, number: int, block_of_layer: dict[int, str]) -> None:
        stack, constants = found.stacks[number], Constants()
        device, offload = self._offload.device, self._offload
        calls: dict[int, list[Arguments]] = {}
        rows: dict[int, int] = {}  # that come into the blocks
        local = [self._batches[batch] for batch in self._local_batches]
        earlier = [path for s in found.stacks[:number] for path in s.paths]
        later = [path for s in found.stacks[number:] for path in s.paths]
        with onload_blocks(self._model, offload, earlier, later):
            found_calls = capture_block_inputs(self._model, stack, local, constants, device)
            for batch, (state, arguments) in zip(self._local_batches, found_calls, strict=True):
                self._states.put(number, 0, batch, BlockInputs(state))
                calls[batch], rows[batch] = arguments, _rows(state)
        self._ranks.barrier()
        needing_drift = {block_of_layer[j] for j in self._modules if j in block_of_layer and self._needs_drift(j)}
        last_float_block = max(
            (i for i, path in enumerate(stack.paths) if path in needing_drift), default=-1
        )  # the last with a float block
        done = next((i for i, path in enumerate(stack.paths) if not offload.is_completed(path)), len(stack.paths))
        for i in range(self._states.latest(number, done, len(self._batches)), len(stack.paths)):
            path, last = stack.paths[i], i + 1 == len(stack.paths)
            inside = [j for j in self._modules if block_of_layer.get(j) == path]
            if last and not inside:
                break
            with offload.block(path):
                block = self._model.get_submodule(path)

                def run(batch: int, block: nn.Module = block, i: int = i, use_float: bool = False) -> object:
                    inputs = self._states.get(number, i, batch)
                    args, kwargs = calls[batch][i].fill(inputs.float_leaves if use_float else inputs.values, constants, device)
                    with default_device(device):
                        return block(*args, **kwargs)

                scope = dict(block.named_modules(prefix=path))
                if path in needing_drift and self._rescaler is not None:
                    self._rescale(inside, self._collected(inside, run), run, scope)
                float_block = None
                if i <= last_float_block:
                    if i < done:
                        raise ValueError(f"{path} is finished, and what it gave is not there any more: begin in a new folder")
                    float_block = FloatBlock(
                        block,
                        path,
                        self._dtypes([j for j in inside if j in self._with_statistics]),
                        partial(run, use_float=True),
                        rows,
                    )
                if path in needing_drift and float_block is not None:
                    self._quantize_by_level(inside, run, scope, float_block)
                else:
                    self._quantize(inside, run, scope)
                if not last:
                    for batch in self._local_batches:
                        outputs = _block_outputs(run(batch), stack.next_inputs(i))
                        float_outputs = (
                            _block_outputs(float_block.run(batch), stack.next_inputs(i))
                            if float_block is not None and i < last_float_block
                            else None
                        )
                        self._states.put(number, i + 1, batch, BlockInputs(outputs, float_outputs))
                self._ranks.barrier()
                if i >= done and self._ranks.rank == 0:
                    offload.save_block(path, [self._replacement.entries[j] for j in inside])
                self._ranks.barrier()
            if self._ranks.rank == 0:
                self._states.drop(number, i)

    def _calibrate_remaining(self, paths: list[str]) -> None:
        """What stands outside of blocks, by runs of the whole model."""
        remaining = list(self._modules)
        if remaining:
            with onload_blocks(self._model, self._offload, paths):
                inside = tuple(f"{path}." for path in paths)
                scope = {n: m for n, m in self._model.named_modules() if n not in paths and not n.startswith(inside)}
                self._quantize(remaining, lambda batch: call(self._model, self._batches[batch], self._offload.device), scope)
                if self._rescaler is not None:
                    self._offload.mark_modified(self._rescaler.modified)

    # ---- statistics ----------------------------------------------------------------------------------------------

    def _needs_drift(self, i: int) -> bool:
        config = self._replacement.entries[i].config
        return config is not None and config.needs_drift

    def _dtypes(self, places: Sequence[int]) -> dict[str, torch.dtype]:
        """In which dtypes the layers at ``places`` came, by name."""
        return {self._names[i]: getattr(torch, self._replacement.entries[i].dtype) for i in places}

    def _quantize_by_level(
        self, places: list[int], run: Callable[[int], object], scope: Mapping[str, nn.Module], float_block: FloatBlock
    ) -> None:
        """Round and replace the layers at ``places`` in the order in which they read each other, each with statistics of what
        those before it, rounded, give, and of how far that is from what ``float_block`` gives."""
        dtypes = self._dtypes(places)
        heard = {self._names[i]: self._modules[i] for i in places if i in self._with_statistics or i in self._experts}

        def run_in_dtypes(batch: int) -> object:
            left = {self._names[i]: self._modules[i] for i in places if i in self._modules and i in self._with_statistics}
            with in_dtypes(left, {name: dtypes[name] for name in left}):
                return run(batch)

        local = topological_levels(heard, partial(run_in_dtypes, self._local_batches[0])) if self._local_batches else None
        order = next((found for found in self._ranks.all_gather(local) if found is not None), [])
        at = {self._names[i]: i for i in places}
        for step in [[name for name in at if name not in heard], *order]:
            self._quantize([at[name] for name in step], run_in_dtypes, scope, float_block)

    def _quantize(
        self,
        places: list[int],
        run: Callable[[int], object],
        scope: Mapping[str, nn.Module],
        float_block: FloatBlock | None = None,
    ) -> None:
        """Round and replace the layers at ``places`` with the statistics of ``run``, called with each batch, which runs the
        modules in ``scope``, which are rewritten before, unless a ``float_block`` runs beside them.

        Every process rounds some of the groups, and all place what came of them. Where there is no room for all statistics at
        once, batches run again for the rest, and no layer is replaced before every one is rounded: the bytes are the same.
        """
        rounded_weights: dict[int, RoundedWeight] = {}
        parts: dict[int, dict[int, RoundedExpert]] = {}  # of experts of which some are still to be rounded
        while places:
            done = {expert_key(self._names[i], expert) for i, found in parts.items() for expert in found}
            collector = self._collected(places, run, float_block, skip=done)
            later = [i for i in places if any(map(collector.is_deferred, self._keys(i)))]
            now = [
                i for i in places if i not in later or (i in self._experts and not all(map(collector.is_deferred, self._keys(i))))
            ]
            if self._rescaler is not None and float_block is None:
                self._rescale(now, collector, run, scope)
            if not self._replacement.quantizes:
                for i in now:
                    self._replace_layer(i, None)
            elif later or rounded_weights or parts or self._ranks.count > 1:
                rounded_weights |= self._rounded(now, collector, parts)
            else:
                self._round_and_replace(now, collector)
            places = later
        # Of a tied weight the layer that has data decides.
        for i in sorted(rounded_weights, key=lambda i: rounded_weights[i].loss is None):
            self._replacement.place(i, rounded_weights[i])
            del self._modules[i]

    def _keys(self, i: int) -> list[str]:
        """What the collector calls what the layer at place ``i`` reads."""
        name = self._names[i]
        return [expert_key(name, expert) for expert in range(self._experts[i].number)] if i in self._experts else [name]

    def _groups(self, places: Sequence[int], collector: Collector) -> list[tuple[str, list[int]]]:
        """Layers at ``places`` that read one tensor, by the name of its statistics; those that have some come first."""
        groups: dict[str, list[int]] = {}
        for i in places:
            groups.setdefault(collector.group(self._names[i]), []).append(i)
        return sorted(groups.items(), key=lambda item: not any(map(collector.has_data, self._keys(item[1][0]))))

    def _round_and_replace(self, places: Sequence[int], collector: Collector) -> None:
        """Round the layers at ``places``, each of which is replaced before the next is rounded."""
        for group, members in self._groups(places, collector):
            self._offload.trim()
            shared = None if members[0] in self._experts else collector.pop_statistics(group)
            for i in members:
                own = [collector.pop_statistics(key) for key in self._keys(i)] if i in self._experts else shared
                self._replace_layer(i, own)
                self._offload.trim()

    def _rounded(
        self, places: Sequence[int], collector: Collector, parts: dict[int, dict[int, RoundedExpert]]
    ) -> dict[int, RoundedWeight]:
        """What becomes of the layers at ``places``, of which this process rounds its share, as of the matrices of experts:
        ``parts`` keeps those of layers that are not whole yet."""
        local: dict[int, RoundedWeight] = {}
        local_parts: dict[int, dict[int, RoundedExpert]] = {}
        number = 0

        def mine(group: str) -> bool:
            nonlocal number
            number += 1
            if own := (number - 1) % self._ranks.count == self._ranks.rank:
                self._offload.trim()
            else:
                collector.discard(group)
            return own

        for group, members in self._groups(places, collector):
            if members[0] in self._experts:
                (i,) = members
                for expert, key in enumerate(self._keys(i)):
                    if expert not in parts.get(i, {}) and not collector.is_deferred(key) and mine(key):
                        rounded = self._replacement.round_expert(i, expert, collector.pop_statistics(key))
                        local_parts.setdefault(i, {})[expert] = rounded
            elif mine(group):
                statistics = collector.pop_statistics(group)
                for i in members:
                    local[i] = self._replacement.round(i, statistics, calibrated=True)
                    self._offload.trim()
        if self._ranks.count > 1:
            local = {i: rounded._replace(weight=moved(rounded.weight, "cpu")) for i, rounded in local.items()}
            for own in local_parts.values():
                own.update({expert: each._replace(weight=moved(each.weight, "cpu")) for expert, each in own.items()})
        for found in self._ranks.all_gather(local_parts):
            for i, theirs in found.items():
                parts.setdefault(i, {}).update(theirs)
        whole = {i: rounded for part in self._ranks.all_gather(local) for i, rounded in part.items()}
        for i in [i for i, experts in parts.items() if len(experts) == self._experts[i].number]:
            experts = parts.pop(i)
            whole[i] = self._replacement.join(i, [experts[expert] for expert in range(len(experts))])
        return whole

    def _rescale(
        self, places: list[int], collector: Collector, run: Callable[[int], object], scope: Mapping[str, nn.Module]
    ) -> None:
        """What comes between collecting and rounding. One batch is enough to see who reads what."""
        assert self._rescaler is not None
        first = next(iter(self._local_batches), None)
        with_statistics = [i for i in places if i in self._with_statistics]
        self._rescaler.rescale(scope, with_statistics, collector, None if first is None else partial(run, first))
        for i in with_statistics:
            self._modules[i] = self._rescaler.module(i)
            self._replacement.note(i, self._rescaler.records.get(i, ()), self._rescaler.notes.get(i, ()))
        self._offload.trim()

    def _collected(
        self,
        places: list[int],
        run: Callable[[int], object],
        float_block: FloatBlock | None = None,
        share: bool = True,
        skip: Collection[str] = (),
    ) -> Collector:
        modules = {self._names[i]: self._modules[i] for i in places if i in self._with_statistics}
        experts = {self._names[i]: self._experts[i] for i in places if i in self._experts} if self._replacement.quantizes else {}
        limit = self._statistics_bytes
        collector = Collector(modules, self._padding, share, limit, float_block is not None, experts, skip)
        error: ValueError | None = None
        try:
            for number in self._local_batches:
                batch = self._batches[number]
                float_inputs, rows = ({}, 0) if float_block is None else float_block.layer_inputs(modules, number)
                with collector.observing(number, batch, float_inputs, rows):
                    run(number)
                self._offload.trim()
            collector.finish()
            diverged = False
        except InputsDivergedError:
            diverged = True
        except ValueError as found:
            diverged, error = False, found
        if not collector.all_reduce(self._ranks, diverged, error):
            return self._collected(places, run, float_block, False, skip)
        return collector


def _block_outputs(output: object, indices: list[int]) -> dict[int, object]:
    """The leaves of a block's output that the next one reads."""
    outputs = list(tree_leaves(output))
    return {i: outputs[i].detach().cpu() if isinstance(outputs[i], Tensor) else outputs[i] for i in indices}


def _rows(values: dict[int, object]) -> int:
    """Of the first tensor in ``tree_leaves`` [..., K], the rows."""
    return next((leaf.numel() // leaf.shape[-1] for leaf in values.values() if isinstance(leaf, Tensor) and leaf.numel()), 0)
