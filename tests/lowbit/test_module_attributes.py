"""What layers carry beyond weight and bias: wherever another takes a layer's place it goes along, or the layer stays and the plan
says why."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.pytorch_utils import Conv1D

import lowbit
from lowbit import CheckpointError, QEmbedding, QLinear, quantize_
from lowbit.transforms import TransformedLinear
from tests.support.models import gpt2, llama, tokens
from tests.support.strategies import schemes

MODULE = frozenset(vars(nn.Module()))
PLAIN = {"linear": nn.Linear, "embedding": nn.Embedding, "conv1d": Conv1D}


def layer(kind: str, cls: type | None = None) -> Any:
    torch.manual_seed(0)
    made: Any = (cls or PLAIN[kind])(16, 16)
    return made


def derived(**members: Any) -> Callable[[Any], Any]:
    """What makes a layer one of a subclass that has ``members`` too."""

    def change(module: Any) -> Any:
        module.__class__ = type("Derived", (type(module),), members)
        return module

    return change


def hooked(name: str) -> Callable[[Any], Any]:
    def change(module: Any) -> Any:
        # A state is passed through: saving and copying go on working.
        getattr(module, name)(lambda *args, **kwargs: None)
        return module

    return change


def set_to(name: str, value: Any) -> Callable[[Any], Any]:
    def change(module: Any) -> Any:
        setattr(module, name, value(module) if isinstance(value, types.FunctionType) else value)
        return module

    return change


def pruned(module: Any) -> Any:
    prune.random_unstructured(module, "weight", amount=0.5)
    return module


def double(module: Any, x: Tensor) -> Tensor:
    return type(module).__mro__[1].forward(module, x) * 2


def compiled(module: Any) -> Any:
    module.compile(backend="eager")
    return module


def listening(module: Any, register: str) -> Any:
    getattr(module.weight, register)(lambda *args: None)
    return module


# What a layer may carry, and what the plan has to call it where it cannot be kept.
KEPT: dict[str, Callable[[Any], Any]] = {
    "a number": set_to("init_scale", 0.5),
    "a mark of transformers": set_to("_is_hf_initialized", True),
    "a tensor": set_to("running", lambda module: torch.arange(3.0)),
    "a function": set_to("rule", lambda module: torch.sigmoid),
    "a list": set_to("seen", lambda module: [1, 2]),
    "a name": set_to("layer_name", "here"),
    "an attribute of its weight": lambda module: setattr(module.weight, "no_decay", ["yes"]) or module,
    "sparse": set_to("sparse", True),
    "its mode": lambda module: module.eval(),
    "another constructor": derived(__init__=lambda self: None, reset_parameters=lambda self: None),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameter": (lambda m: m.register_parameter("alpha", nn.Parameter(torch.ones(3))) or m, "the parameter alpha"),
    "no parameter": (lambda m: m.register_parameter("alpha", None) or m, "the parameter alpha"),
    "the weight again": (set_to("again", lambda module: module.weight), "the parameter again"),
    "buffer": (lambda m: m.register_buffer("mask", torch.ones(3)) or m, "the buffer mask"),
    "passing buffer": (lambda m: m.register_buffer("mask", torch.ones(3), persistent=False) or m, "the buffer mask"),
    "module": (lambda m: m.add_module("probe", nn.Identity()) or m, "the module probe"),
    "a name of the quantized layer's": (set_to("scheme", "mine"), "the attribute scheme"),
    "its own method": (set_to("call", lambda module: module.extra_repr), "the attribute call"),
    "a view of its weight": (set_to("view", lambda module: module.weight.data[:2]), "the attribute view"),
    "a name of the quantized weight's": (lambda m: setattr(m.weight, "scale", 1) or m, "the attribute scale of its weight"),
    "method": (derived(logits=lambda self: 1), "Derived adds logits"),
    "property": (derived(half=property(lambda self: 1)), "Derived adds half"),
    "class attribute": (derived(tag=3), "Derived adds tag"),
    "its own call": (derived(__call__=lambda self, x: x), "Derived adds __call__"),
    "its own state": (derived(get_extra_state=lambda self: None), "Derived adds get_extra_state"),
    "forward": (derived(forward=double), "computes something of its own"),
    "forward of one": (lambda m: setattr(m, "forward", partial(double, m)) or m, "hooks"),
    "compiled": (compiled, "the attribute _compiled_call_impl"),
    "weight hook": (lambda module: listening(module, "register_hook"), "hooks"),
    "gradient hook": (lambda module: listening(module, "register_post_accumulate_grad_hook"), "hooks"),
    "parametrization": (lambda m: parametrize.register_parametrization(m, "weight", nn.Softplus()) or m, "not a plain parameter"),
    "weight norm": (lambda module: parametrizations.weight_norm(module), "not a plain parameter"),
    "pruned": (pruned, "not a plain parameter"),
    **{
        name: (hooked(name), "hooks")
        for name in (
            "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
            "register_full_backward_pre_hook", "register_state_dict_post_hook", "register_state_dict_pre_hook",
            "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook",
        )
    },
}  # fmt: skip


def belongings(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Everything that ``module`` has beside its weight and bias, read off torch's own books."""
    found: dict[tuple[str, str], Any] = {("mode", ""): module.training}
    found.update({("attribute", name): value for name, value in vars(module).items() if name not in MODULE})
    found.update(
        {("of the weight", name): value for name, value in vars(module.weight).items()} if hasattr(module, "weight") else {}
    )
    for books in ("_parameters", "_buffers", "_modules"):
        held = getattr(module, books).items()
        found.update({(books, name): value for name, value in held if name not in ("weight", "bias")})
    for books in [name for name in MODULE if name.endswith("_hooks")]:
        found.update({(books, str(key)): value for key, value in vars(module)[books].items()})
    found.update({("class", name): None for name in dir(type(module))})
    return found


def check(old: Any, before: dict[tuple[str, str], Any], new: Any) -> None:
    """The layer stands where it stood with all that it had, or another has it all."""
    after = belongings(new)
    if new is not old:
        assert isinstance(new, QLinear | QEmbedding | TransformedLinear)
    missing = {key for key in before if key not in after and key[0] != "class"}
    missing |= {key for key in before if key[0] == "class" and not hasattr(new, key[1])}
    assert not missing
    changed = [key for key, value in before.items() if key[0] != "class" and after[key] is not value and after[key] != value]
    assert not changed


ALONE = {"parametrization", "weight norm", "pruned"}  # they put other tensors in the weight's place


@given(
    kind=st.sampled_from(tuple(PLAIN)),
    extras=st.lists(
        st.sampled_from([name for name in (*KEPT, *REFUSED) if name not in ALONE]), min_size=1, max_size=3, unique=True
    ),
    scheme=schemes(),
)
@settings(max_examples=40)
def test_whatever_a_layer_carries_is_kept_or_named(kind, extras, scheme):
    module = layer(kind)
    for extra in extras:
        module = KEPT[extra](module) if extra in KEPT else REFUSED[extra][0](module)
    model = nn.ModuleDict({"it": module, "other": nn.Linear(16, 16)})
    before = belongings(module)
    plan = lowbit.plan(model, {"it": scheme, "other": scheme})
    assert quantize_(model, {"it": scheme, "other": scheme}) == plan
    (entry,) = [found for found in plan.layers if found.name == "it"]
    refused = any(extra in REFUSED for extra in extras)
    assert (entry.config is None) == (model["it"] is module) == refused
    assert isinstance(model["other"], QLinear)
    check(module, before, model["it"])


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("extra", REFUSED)
def test_the_plan_names_what_would_be_lost(kind, extra):
    change, name = REFUSED[extra]
    model = nn.ModuleDict({"it": change(layer(kind)), "other": nn.Linear(16, 16)})
    plan = lowbit.plan(model, {"it": "int8", "other": "int8"})
    reason = next(found.reason for found in plan.layers if found.name == "it")
    assert name in reason


@pytest.mark.parametrize(
    "hold", [lambda m: m, lambda m: [m], lambda m: {"a": m}, lambda m: m.forward], ids=["it", "list", "dict", "method"]
)
def test_a_layer_that_an_attribute_holds_too_stays(hold):
    """Torch tells of no module in a list, so that nothing could be put in its place there."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    vars(model[1])["neighbour"] = hold(model[0])
    plan = quantize_(model, "int8")
    assert [entry.name for entry in plan.quantized] == ["1"]
    assert plan.skipped[0].reason.startswith("the attribute 1.neighbour holds it too")


def test_parameters_beside_a_weight_are_in_the_plan():
    model = nn.Sequential(REFUSED["parameter"][0](nn.Linear(16, 16)), nn.Linear(16, 16))
    model[0].down = nn.Parameter(torch.ones(4, 16))
    plan = lowbit.plan(model, "int8")
    assert {entry.name: entry.reason for entry in plan.skipped}["0.down"] == "a parameter of Linear beside its weight"
    assert plan.bytes_before == sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)


def test_hooks_on_a_bias_stay_with_it():
    model, recorded = nn.Sequential(nn.Linear(16, 16)), []
    model[0].bias.register_hook(lambda gradient: recorded.append(gradient))
    quantize_(model, "int8")
    model(torch.ones(1, 16)).sum().backward()
    assert len(recorded) == 1


# ---- the other ways in which a module takes another's place ------------------------------------------------------------


def marked(model: nn.Module) -> tuple[nn.Module, dict[str, dict[tuple[str, str], Any]]]:
    """``model`` with attributes on each of its modules, every second of them in training, and what each of them had then."""
    for i, module in enumerate(model.modules()):
        module.number, module.note, module.training = i, ["of", i], i % 2 == 0
    return model, {name: belongings(module) for name, module in model.named_modules()}


def check_all(model: nn.Module, before: dict[str, dict[tuple[str, str], Any]]) -> None:
    for name, found in before.items():
        module = model.get_submodule(name)
        attributes = {key: value for key, value in found.items() if key[1] in ("number", "note") or key[0] == "mode"}
        assert len(attributes) == 3
        after = belongings(module)
        assert all(after[key] is value for key, value in attributes.items()), name


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("recipe", ["rotation(int8, online=true)", "awq(int3)", "int4"])
def test_rewrites_hand_on_what_they_replace(recipe, make):
    for apply in (quantize_,) if recipe == "int4" else (lowbit.rewrite_, quantize_):
        model, before = marked(make())
        apply(model, recipe, calibration=None if recipe == "int4" else tokens(4, 12))
        check_all(model, before)


@pytest.mark.parametrize("place", ["transformer.h.0.ln_1", "transformer.h.1.mlp.c_proj"])
def test_a_rotation_that_would_lose_something_is_refused_before_any_weight_changes(place):
    model = gpt2()
    model.get_submodule(place).register_state_dict_post_hook(lambda *args: None)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"place of {place}, and cannot: it carries hooks"):
        lowbit.rewrite_(model, "rotation(int8, online=true)")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", PLAIN)
def test_loading_keeps_what_the_models_layers_carry(kind, tmp_path):
    source = nn.ModuleDict({"it": layer(kind), "last": nn.Linear(16, 16)})
    quantize_(source, {"it": "int8", "last": "int4"})
    lowbit.save(source, tmp_path)
    for name, change in KEPT.items():
        model = nn.ModuleDict({"it": change(layer(kind)), "last": nn.Linear(16, 16)}).eval()
        before = belongings(model["it"])
        assert torch.equal(lowbit.load(tmp_path, model=model)["it"].weight, source["it"].weight), name
        check(None, before, model["it"])
    for name, (change, reason) in REFUSED.items():
        model = nn.ModuleDict({"it": change(layer(kind)), "last": nn.Linear(16, 16)})
        module, before = model["it"], belongings(model["it"])
        if name not in ALONE:
            with pytest.raises(CheckpointError, match=f"it is quantized in the file, and cannot be replaced .*{reason}"):
                lowbit.load(tmp_path, model=model)
        check(module, before, model["it"])


def test_loading_inserted_modules_keeps_what_they_replace(tmp_path):
    model = gpt2()
    lowbit.rewrite_(model, "rotation(int8, online=true)")
    lowbit.save(model, tmp_path)
    target, _ = marked(gpt2())
    before = {name: belongings(module) for name, module in target.eval().named_modules()}
    lowbit.load(tmp_path, model=target)
    check_all(target, before)
    target = gpt2()
    target.transformer.h[0].ln_1.register_forward_hook(lambda *args: None)
    with pytest.raises(CheckpointError, match=r"h\.0\.ln_1 is a rms_norm in the file, and cannot be replaced .* hooks"):
        lowbit.load(tmp_path, model=target)


def test_a_tensor_of_an_attribute_that_has_no_numbers_is_named(tmp_path):
    source = nn.Sequential(nn.Linear(16, 16))
    quantize_(source, "int8")
    lowbit.save(source, tmp_path)
    outline = nn.Sequential(nn.Linear(16, 16)).to("meta")
    outline[0].table = torch.empty(3, device="meta")
    with pytest.raises(CheckpointError, match=r"0\.table is a plain tensor on the meta device"):
        lowbit.load(tmp_path, model=outline)
