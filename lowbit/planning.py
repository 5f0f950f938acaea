"""Plans: what quantize_ will do to each layer, what it saves, which kernel will run, and why a layer is left alone."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lowbit_kernels import epilogues, registry
from lowbit_kernels.ops import call_for

from .algorithms import ROUNDERS
from .embedding import QEmbedding
from .environment import usable_device
from .layer_config import LayerConfig
from .layers import Layer, find_layers, tied_groups
from .linear import QLinear
from .plans import LayerPlan, Plan
from .recipe import Recipe, RecipeLike, block_counts, name_matches
from .tensor import QTensor

__all__ = ["Explanation", "explain", "plan", "planned", "resolve"]

BATCHES = (1, 16, 512)
NO_PATTERN = "no pattern matches"
NOT_CONVERTED = "modules_to_not_convert"
BY_NAME = "name it in a pattern to quantize it"
WEIGHT_ALONE = "its weight alone: inputs are rounded by linear layers"
_GIVE = "give quantize_ calibration= (texts, token ids, batches, or the path of a text file)"
FilterFn = Callable[[nn.Module, str], bool]


def plan(
    model: nn.Module, recipe: RecipeLike, *, filter_fn: FilterFn | None = None, device: str | torch.device | None = None
) -> Plan:
    """What ``quantize_(model, recipe)`` would do, without touching the model.

    ``recipe`` and ``filter_fn`` as in :func:`lowbit.quantize_`; ``device``: where the model will run, to tell the kernels
    (its own device by default). Raises ``ValueError`` for a pattern that matches nothing.
    """
    return resolve(model, Recipe.of(recipe), filter_fn, device)[0]


def resolve(
    model: nn.Module, recipe: Recipe, filter_fn: FilterFn | None, device: str | torch.device | None
) -> tuple[Plan, list[Layer]]:
    """The plan, and the layer that each of its entries speaks of."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    where = None if device is None else usable_device(device)
    layers = find_layers(model)
    counts = block_counts(name for layer in layers for name in layer.names)
    _check_rules(recipe, layers, counts)
    _check_keep_names(recipe, model)
    decisions = [_decide(layer, recipe, counts, filter_fn) for layer in layers]
    groups = tied_groups(layers)
    for group in groups:
        _skip_tied_to_excluded(group, layers, decisions, recipe, counts)
        _follow_ties(group, layers, decisions)
    tied_names = {i: layers[group[0]].name for group in groups for i in group[1:]}
    shared = {i for group in groups for i in group}
    entries = []
    for i, (layer, (config, reason)) in enumerate(zip(layers, decisions, strict=True)):
        entries.append(_entry(layer, config, reason, tied_names.get(i), i in shared, where))
    return Plan(recipe, tuple(entries), tuple(_idle_rules(recipe, entries, counts))), layers


def planned(
    model: nn.Module,
    recipe: Recipe,
    filter_fn: FilterFn | None,
    device: str | torch.device | None,
    has_data: bool = False,
) -> tuple[Plan, list[Layer]]:
    """A plan that changes something and has the data that it needs, and the layer that each of its entries speaks of."""
    resolved, layers = resolve(model, recipe, filter_fn, device)
    if not resolved.quantized:
        raise ValueError(f"nothing would change in {len(resolved.skipped)} layers ({_skip_reasons(resolved)})")
    rewrite = next((rewrite for rewrite in recipe.rewrites if rewrite.method.needs_data), None)
    if rewrite is not None and not has_data:
        raise ValueError(f"the rewrite {rewrite.name} looks at data, and there is none: {_GIVE}")
    needy = [] if has_data else [entry for entry in resolved.quantized if entry.config is not None and entry.config.needs_data]
    if needy:
        entry = needy[0]
        assert entry.config is not None
        more = f" and {len(needy) - 1} more layers" if needy[1:] else ""
        raise ValueError(f"{entry.config.needs_data} of {entry.name}{more} looks at data, and there is none: {_GIVE}")
    return resolved, layers


def _check_rules(recipe: Recipe, layers: list[Layer], counts: dict[str, int]) -> None:
    names = [name for layer in layers for name in layer.names]
    if not names:
        raise ValueError("the model has no linear layer and no embedding")
    covered: set[str] = set()
    for rule in recipe.rules:
        matched = {name for name in names if rule.matches(name, counts)}
        if not matched and rule.optional:
            continue
        if not matched:
            closest = difflib.get_close_matches(rule.pattern, names, n=3, cutoff=0.0)
            raise ValueError(f"pattern {rule} matches no layer; the nearest are {', '.join(closest)}")
        if matched <= covered:
            raise ValueError(f"pattern {rule} never applies: patterns before it take all that it matches")
        covered |= matched


def _idle_rules(recipe: Recipe, entries: list[LayerPlan], counts: dict[str, int]) -> Iterator[str]:
    """What there is to say of rules that quantize nothing in this model, and were meant to."""
    for rule in recipe.rules:
        if rule.config is None:
            continue
        matched = [entry for entry in entries if recipe.rule_for(entry.names, counts) is rule]
        if not matched:
            yield f"pattern {rule} matches nothing in this model"
        elif not any(entry.config is not None for entry in matched):
            first = matched[0]
            more = f" (and {len(matched) - 1} more)" if matched[1:] else ""
            yield f"pattern {rule} quantizes nothing: {first.name}{more} stays: {first.reason}"


def _check_keep_names(recipe: Recipe, model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for key in recipe.keep:
        if not any(name_matches(key, name) for name in names):
            closest = difflib.get_close_matches(key, names, n=3, cutoff=0.0)
            raise ValueError(
                f"{key!r} is to be kept and names no module or parameter of the model; the nearest are {', '.join(closest)}"
            )


def _decide(layer: Layer, recipe: Recipe, counts: dict[str, int], filter_fn: FilterFn | None) -> tuple[LayerConfig | None, str]:
    rule = recipe.rule_for(layer.names, counts)
    if layer.unsupported_reason is not None:
        return None, layer.unsupported_reason
    if key := next((key for key in recipe.keep for name in layer.names if name_matches(key, name)), None):
        return None, f"{NOT_CONVERTED} has {key}"
    if rule is None:
        return None, NO_PATTERN
    if rule.config is None:
        return None, f"pattern {rule} leaves it"
    if rule.catch_all and layer.excluded_as:
        return None, f"{layer.excluded_as}: {BY_NAME}"
    if layer.name_only_reason and not any(rule.names(name, counts) for name in layer.names):
        return None, f"{layer.name_only_reason}: {BY_NAME}"
    if filter_fn is not None and not filter_fn(layer.module, layer.name):
        return None, "filter_fn leaves it"
    return _of_parameter(layer, rule.config, recipe) if layer.is_parameter else (rule.config, "")


def _of_parameter(layer: Layer, config: LayerConfig, recipe: Recipe) -> tuple[LayerConfig, str]:
    """What becomes of a parameter in a module that stays, and what is other for it: of parameters, statistics are taken of what
    experts read, and of no other's inputs."""
    reasons = []
    if config.activation is not None:
        config = config.replace(activation=None, activation_scale="token")
        reasons.append(WEIGHT_ALONE)
    if ROUNDERS[config.rounder].needs_statistics and layer.kind != "experts":
        reasons.append(
            f"{config.rounder} needs statistics, which are taken of linear layers and experts: rounded to nearest, scales=mse"
        )
        config = config.replace(rounder="rtn", options=(), scales="mse")
    blockwise = [rewrite.name for rewrite in recipe.rewrites if rewrite.method.kind == "block"]
    if blockwise:
        reasons.append(f"{' and '.join(blockwise)} leaves what it reads as it is")
    return config, "; ".join(reasons)


def _skip_tied_to_excluded(
    group: list[int],
    layers: list[Layer],
    decisions: list[tuple[LayerConfig | None, str]],
    recipe: Recipe,
    counts: dict[str, int],
) -> None:
    """What shares the weight of a layer that rules for everything leave is left by them too."""
    left = next((i for i in group if decisions[i][1].endswith(BY_NAME) and layers[i].excluded_as), None)
    rules = [recipe.rule_for(layers[i].names, counts) for i in group if decisions[i][0] is not None]
    if left is None or not all(rule is not None and rule.catch_all for rule in rules):
        return
    for i in group:
        if decisions[i][0] is not None:
            decisions[i] = None, f"tied to {layers[left].name}, {layers[left].excluded_as}: {BY_NAME}"


def _follow_ties(group: list[int], layers: list[Layer], decisions: list[tuple[LayerConfig | None, str]]) -> None:
    """Layers that read one weight share its fate, so that they stay tied."""
    wanted = {decisions[i][0] for i in group} - {None}
    names = " and ".join(layers[i].name for i in group)
    if len(wanted) > 1:
        raise ValueError(f"{names} share one weight and cannot become both {' and '.join(sorted(map(str, wanted)))}")
    if not wanted:
        return
    if any(decisions[i][1].startswith(("pattern", NOT_CONVERTED)) for i in group):
        raise ValueError(f"{names} share one weight: give both the same config, or both None")
    first = next(layers[i].name for i in group if decisions[i][0] is not None)
    blocked = next(
        (
            i
            for i in group
            if layers[i].unsupported_reason is not None or (layers[i].name_only_reason and decisions[i][0] is None)
        ),
        None,
    )
    for i in group:
        if blocked is not None and i != blocked:
            why = layers[blocked].unsupported_reason or layers[blocked].name_only_reason
            decisions[i] = None, f"tied to {layers[blocked].name}, which cannot be quantized: {why}"
        elif blocked is None and decisions[i][0] is None:
            decisions[i] = next(iter(wanted)), f"tied to {first}"


def _entry(
    layer: Layer, config: LayerConfig | None, reason: str, tied_to: str | None, shared: bool, device: torch.device | None
) -> LayerPlan:
    weight = layer.weight
    if isinstance(weight, QTensor):
        bits = weight.bits_per_weight
        before = after = round(bits * weight.numel() / 8)  # as stored, like the bytes after quantizing
    else:
        before = after = weight.nbytes
        bits = 8.0 * weight.element_size()
    n, k = map(int, weight.shape[-2:])
    matrices = math.prod(weight.shape[:-2])
    dtype = str(weight.dtype).removeprefix("torch.")
    kernels: dict[int, str] = {}
    refusals: dict[int, tuple[tuple[str, str], ...]] = {}
    layout = "canonical"
    if config is not None:
        bits = config.weight.bits_per_weight(k)
        after = round(bits * matrices * n * k / 8) + (4 * matrices if config.weight.outer else 0)
        op = "embedding" if layer.kind == "embedding" else "linear" if config.activation is None else "quantized_linear"
        where = layer.device if device is None else device
        if not shared and layer.kind != "parameter":
            layout = registry.preferred_layout(
                call_for(op, config.weight, layout, where, weight.dtype, 1, n, k, config.activation)
            )
        for m in BATCHES:
            call = call_for(op, config.weight, layout, where, weight.dtype, m, n, k, config.activation)
            rows = registry.explain(call)
            kernels[m] = registry.select(call).name
            refusals[m] = tuple((name, why) for name, why in rows if why is not None)
    return LayerPlan(
        layer.name,
        layer.kind,
        tuple(weight.shape),
        dtype,
        config,
        reason,
        before,
        after,
        bits,
        layer.names,
        tied_to,
        kernels,
        refusals,
        layout,
    )


def _skip_reasons(resolved: Plan) -> str:
    """The reasons, with a layer for each; those of layers that a pattern matched come first."""
    names: dict[str, list[str]] = {}
    for layer in sorted(resolved.skipped, key=lambda layer: layer.reason == NO_PATTERN):
        names.setdefault(layer.reason, []).append(layer.name)
    lines = [f"{found[0]}{f' and {len(found) - 1} more' if found[1:] else ''}: {why}" for why, found in names.items()]
    return "; ".join(lines[:5])


@dataclass(frozen=True)
class Explanation:
    """Which kernel takes a call (``kernel``), and a line for every row of the registry: (name, why it refused or None).
    ``epilogue_placement``: the epilogue, and where it is applied."""

    call: registry.Call
    kernel: str
    rows: tuple[tuple[str, str | None], ...]
    epilogue_placement: str = "none"

    def __str__(self) -> str:
        call = self.call
        dtype = str(call.dtype).removeprefix("torch.")
        head = f"{call.op}, {call.scheme}, {dtype} on {call.device}, M={call.m} N={call.n} K={call.k}"
        head += "" if call.layout == "canonical" else f", from {call.layout}"
        head += "" if self.epilogue_placement == "none" else f", {self.epilogue_placement}"
        lines = [f"  {name}: {why or ('runs' if name == self.kernel else 'would take it')}" for name, why in self.rows]
        return "\n".join([f"{head}: {self.kernel}", *lines])


def explain(
    layer: QLinear | QEmbedding | QTensor, m: int = 1, dtype: torch.dtype | None = None, epilogue: str = "none"
) -> Explanation:
    """Which kernel runs a quantized layer (or weight), and why each other does not.

    Args:
        layer: a layer of a quantized model, or its weight [N, K].
        m: rows of x, or indices of an embedding.
        dtype: of x; by default that which the weight stands for.
        epilogue: the function that a product is asked to end in.

    Raises ``TypeError`` for anything else than a layer or weight, ``ValueError`` for an ``m``, dtype or epilogue that cannot be.
    """
    if not isinstance(layer, QLinear | QEmbedding | QTensor):
        got = type(layer).__name__
        remedy = "quantize_ the model first, then give one of its layers" if isinstance(layer, nn.Module) else "give a layer"
        raise TypeError(f"explain takes a QLinear, a QEmbedding or a QTensor, got {got}: {remedy}")
    if not isinstance(m, int) or m < 0:
        raise ValueError(f"m is a number of rows, 0 or more, got {m!r}")
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    weight = layer if isinstance(layer, QTensor) else layer.weight
    op = "embedding" if isinstance(layer, QEmbedding) else "linear"
    activation = layer.activation if isinstance(layer, QLinear) else None
    if activation is not None:
        op = "quantized_linear"
    n, k = weight.shape[-2:]
    arguments = (op, weight.scheme, weight.byte_layout, weight.device, dtype or weight.dtype, m, n, k, activation)
    epilogues.epilogue(epilogue)  # raises where there is none
    call = call_for(*arguments, epilogue=epilogue)
    kernel = registry.select(call)
    return Explanation(call, kernel.name, tuple(registry.explain(call)), registry.epilogue_placement(kernel, epilogue))
