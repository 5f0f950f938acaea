"""Who reads what a module gives: found by running, in every architecture and in made-up blocks whose truth is known."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowbit.rewrites.absorption import absorb, scale_columns
from lowbit.rewrites.reader_map import Source, find_readers, pattern
from lowbit.rewrites.rescaling import sealed
from tests.ecosystem import test_architectures as architectures


def first_block(model: nn.Module, path: str) -> tuple[nn.Module, Callable[[], Any]]:
    """A block of ``model`` and what runs it as a run of the whole model does."""
    block, held = model.get_submodule(path), []
    hook = block.register_forward_pre_hook(lambda module, args, kwargs: held.append((args, kwargs)), with_kwargs=True)
    model.config.use_cache = False
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(ids, **({"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}))
    hook.remove()
    args, kwargs = held[0]
    return block, lambda: block(*args, **kwargs)


def stirred(model: nn.Module) -> nn.Module:
    """``model`` with random gains and biases: what a new model has, ones and zeros, would hide much."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def rows(first: int, stop: int) -> list[int]:
    return list(range(first, stop))


LLAMA = {
    "input_layernorm": ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, rows(0, 64)),
    "self_attn.v_proj": ({"self_attn.o_proj"}, [*rows(0, 16), *rows(0, 16), *rows(16, 32), *rows(16, 32)]),  # two heads of 16
    "post_attention_layernorm": ({"mlp.gate_proj", "mlp.up_proj"}, rows(0, 64)),
    "mlp.up_proj": ({"mlp.down_proj"}, rows(0, 112)),
}
GEMMA = {**LLAMA, "pre_feedforward_layernorm": LLAMA["post_attention_layernorm"]}
del GEMMA["post_attention_layernorm"]  # what is behind attention there is added to the stream
SOURCES: dict[str, tuple[str, dict[str, tuple[set[str], list[int]]]]] = {
    "llama": ("model.layers.0", LLAMA),
    "gemma2": ("model.layers.0", GEMMA),
    "gemma3": ("model.layers.0", GEMMA),
    "gpt2": (
        "transformer.h.0",
        {
            "ln_1": ({"attn.c_attn"}, rows(0, 48)),
            "attn.c_attn": ({"attn.c_proj"}, rows(96, 144)),  # the values, behind queries and keys
            "ln_2": ({"mlp.c_fc"}, rows(0, 48)),
        },
    ),
    "opt": (
        "model.decoder.layers.0",
        {
            "self_attn_layer_norm": ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, rows(0, 64)),
            "self_attn.v_proj": ({"self_attn.out_proj"}, rows(0, 64)),
            "final_layer_norm": ({"fc1"}, rows(0, 64)),
            "fc1": ({"fc2"}, rows(0, 112)),
        },
    ),
    "phi": (
        "model.layers.0",
        {
            "input_layernorm": ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"}, rows(0, 64)),
            "self_attn.v_proj": ({"self_attn.dense"}, rows(0, 64)),
        },
    ),
    # Experts in one tensor read what the second norm gives, and cannot be multiplied.
    "mixtral": ("model.layers.0", {name: LLAMA[name] for name in ("input_layernorm", "self_attn.v_proj")}),
    "qwen2_moe": (
        "model.layers.0",
        {
            **{name: LLAMA[name] for name in ("input_layernorm", "self_attn.v_proj")},
            "mlp.shared_expert.up_proj": ({"mlp.shared_expert.down_proj"}, rows(0, 48)),
        },
    ),
    # Norms come behind the sums here, and their output goes on in the stream too.
    "bert": ("bert.encoder.layer.0", {"attention.self.value": ({"attention.output.dense"}, rows(0, 64))}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_sources_of_an_architecture(name):
    path, expected = SOURCES[name]
    block, run = first_block(stirred(architectures.build(name)), path)
    with torch.no_grad():
        found = find_readers(dict(block.named_modules()), run).sources
    assert {source.name: set(source.readers) for source in found} == {name: readers for name, (readers, _) in expected.items()}
    for source in found:
        channels = expected[source.name][1]
        if name == "phi" and source.name == "self_attn.v_proj":
            channels = next(iter(source.readers.values())).tolist()  # heads are grouped as the configuration has it
        assert all(channel.tolist() == channels for channel in source.readers.values())
    order = [name for name, _ in block.named_modules()]
    assert [order.index(source.name) for source in found] == sorted((order.index(s.name) for s in found), reverse=True)


def fold(modules: dict[str, nn.Module], source: Source, seed: int = 0) -> None:
    """Divide what ``source`` gives by random numbers from 1/8 to 8, and multiply what its readers do with it."""
    divisor = torch.exp2(6 * torch.rand(source.channels, generator=torch.Generator().manual_seed(seed)).double() - 3)
    divisor = torch.where(source.reached, divisor, 1.0)
    divisor = absorb(modules[source.name], source.absorb_rule, divisor)
    for name, channel in source.readers.items():
        scale_columns(modules[name], torch.where(channel >= 0, divisor[channel.clamp(min=0)], 1.0))


def apart(a: Any, b: Any) -> float:
    """The largest difference of two outputs, relative to the largest number in one."""
    a, b = (x[0] if isinstance(x, tuple) else x for x in (a, b))
    return float((a - b).abs().max() / a.abs().max())


# torch multiplies experts in one tensor in float32 and narrower dtypes alone.
OF_FLOAT64 = [name for name in SOURCES if name not in ("mixtral", "qwen2_moe")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(SOURCES, (torch.float32, torch.bfloat16)), *itertools.product(OF_FLOAT64, (torch.float64,))],
)
def test_any_divisors_of_all_sources_leave_the_output_as_it_was(name, dtype):
    path, expected = SOURCES[name]
    block, run = first_block(stirred(architectures.build(name)).to(dtype), path)
    modules = dict(block.named_modules())
    before = copy.deepcopy(block.state_dict())
    with torch.no_grad():
        y = run()
        found = find_readers(modules, run).sources
        assert all(torch.equal(tensor, before[key]) for key, tensor in block.state_dict().items())  # looking changes nothing
        for i, source in enumerate(found):
            fold(modules, source, i)
        assert {source.name for source in found} == set(expected)
        room = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.06}[dtype]  # bf16 weights are rounded anew
        assert apart(y, run()) <= (1e-5 if name.startswith("gemma") and dtype == torch.float64 else room)  # norms in float32
    assert sum(not torch.equal(tensor, before[key]) for key, tensor in block.state_dict().items()) >= 2 * len(found)


# ---- made-up blocks --------------------------------------------------------------------------------------------------

HOMOGENEOUS = {"identity": lambda x: x, "relu": torch.relu, "leaky": nn.functional.leaky_relu}
CURVED = {"gelu": nn.functional.gelu, "silu": nn.functional.silu, "tanh": torch.tanh}
ACTIVATIONS = {**HOMOGENEOUS, **CURVED}


class MadeUp(nn.Module):
    """A norm, a wide layer or two, whatever is between, and a layer back; channels may be mixed up on the way."""

    def __init__(self, k: int, width: int, activation: str, gated: bool, repeat: int, order: list[int], bare: bool, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(k) if seed % 2 else nn.RMSNorm(k)
        self.up = nn.Linear(k, width, bias=bool(seed % 3))
        self.gate = nn.Linear(k, width) if gated else None
        self.router = nn.Linear(k, 1)
        self.down = nn.Linear(width * repeat, k)
        self.activation, self.repeat, self.order, self.bare = ACTIVATIONS[activation], repeat, order, bare
        stirred(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        hidden = self.up(y) if self.gate is not None else self.activation(self.up(y))
        if self.gate is not None:
            hidden = hidden * self.activation(self.gate(y))
        hidden = hidden.repeat_interleave(self.repeat, -1)[..., self.order]
        out = x + self.down(hidden) * torch.sigmoid(self.router(y))
        return out + y if self.bare else out


@st.composite
def made_up(draw: st.DrawFn) -> tuple[MadeUp, dict[str, dict[str, list[int]]]]:
    """A block, and for each of its sources the channels that its readers get."""
    k, width, repeat = draw(st.integers(2, 9)), draw(st.integers(2, 9)), draw(st.integers(1, 3))
    activation, gated, bare = draw(st.sampled_from(sorted(ACTIVATIONS))), draw(st.booleans()), draw(st.booleans())
    order = draw(st.permutations(range(width * repeat)))
    block = MadeUp(k, width, activation, gated, repeat, order, bare, draw(st.integers(0, 1000)))
    known = {}
    if not bare:
        known["norm"] = {name: rows(0, k) for name in ("up", "gate", "router") if name != "gate" or gated}
    through = [i // repeat for i in order]
    if gated or activation in HOMOGENEOUS:
        known["up"] = {"down": through}
    if gated and activation in HOMOGENEOUS:
        known["gate"] = {"down": through}
    return block, known


@settings(max_examples=60)
@given(made_up(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_made_up_blocks(found, dtype):
    block, known = found
    block = block.to(dtype)
    x = torch.randn(3, 30, block.router.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        y = block(x)
        if block.gate is not None and not bool(block.activation(block.gate(block.norm(x))).any(0).any(0).all()):
            known.pop("up")  # a channel that the gate never opens tells nothing of where it comes from
        sources = find_readers(dict(block.named_modules()), lambda: block(x)).sources
        reported = {s.name: {name: channel.tolist() for name, channel in s.readers.items()} for s in sources}
        assert reported == known
        for i, source in enumerate(sources):
            fold(dict(block.named_modules()), source, i)
        if dtype.itemsize > 2:
            assert apart(y, block(x)) <= 1e-5


class Experts(nn.Module):
    """A norm, a router and experts of which a token reads the one that the router likes best."""

    def __init__(self, k: int = 8, experts: int = 6, leaky: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.router, self.leaky = nn.LayerNorm(k), nn.Linear(k, experts), leaky
        parts = {"w1": (k, 12), "w3": (k, 12), "w2": (12, k)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size) for name, size in parts.items()}) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        chosen = self.router(y).argmax(-1)
        out = y if self.leaky else torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if bool((mine := chosen == i).any()):
                hidden = nn.functional.silu(expert["w1"](y[mine])) * expert["w3"](y[mine])
                out = out.index_put((mine,), expert["w2"](hidden) + out[mine])
        return x + out


@pytest.mark.parametrize("tokens", [200, 2])
def test_experts_are_readers_also_where_no_token_comes(tokens):
    """With two tokens most experts are silent, and are taken for what the others are."""
    block = Experts()
    modules = dict(block.named_modules())
    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(2))
    other = torch.randn(300, 8, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        before = block(other)
        sources = find_readers(modules, lambda: block(x)).sources
        (norm,) = [source for source in sources if source.name == "norm"]
        assert set(norm.readers) == {"router", *(f"experts.{i}.{leaf}" for i in range(6) for leaf in ("w1", "w3"))}
        inside = [source for source in sources if source.name != "norm"]
        assert inside
        assert all(set(s.readers) == {s.name.replace("w3", "w2")} for s in inside)
        for i, source in enumerate(sources):
            fold(modules, source, i)
        assert apart(before, block(other)) <= 1e-5  # which come to every expert


def test_a_silent_layer_like_no_other_could_read_anything():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.rare = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.rare(y) if len(x) > 100 else self.a(y)

    block = Hidden()
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert find_readers(dict(block.named_modules()), lambda: block(x)).sources == ()


def test_whoever_reads_besides_linear_layers_keeps_a_module_from_being_a_source():
    block, x = Experts(leaky=True), torch.randn(50, 8)  # what the norm gives is added to the output
    with torch.no_grad():
        found = {source.name for source in find_readers(dict(block.named_modules()), lambda: block(x)).sources}
    assert "norm" not in found
    assert "experts.0.w3" in found


def test_shared_parameters_are_sealed():
    model = architectures.build("llama")
    block, run = first_block(model, "model.layers.0")
    model.model.layers[1].input_layernorm = block.input_layernorm
    block.mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    closed = sealed(model)
    assert closed == {
        *(f"model.layers.{i}.{name}" for i in (0, 1) for name in ("input_layernorm", "mlp.up_proj")),
    } | ({"lm_head", "model.embed_tokens"} if model.config.tie_word_embeddings else set())
    with torch.no_grad():
        found = find_readers(dict(block.named_modules(prefix="model.layers.0")), run, closed).sources
    assert {source.name for source in found} == {"model.layers.0.self_attn.v_proj"}  # the norm's readers are sealed too


def test_dead_channels_do_not_hide_what_they_come_from():
    """A gain of 0 silences a channel, and its readers are told all the same."""
    block = MadeUp(6, 4, "relu", False, 1, [3, 1, 0, 2], False, 1)
    with torch.no_grad():
        block.norm.weight[2] = block.norm.bias[2] = 0
        block.up.weight[1] = 0
        block.up.bias[1] = 0
        x = torch.randn(20, 6)
        y = block(x)
        sources = find_readers(dict(block.named_modules()), lambda: block(x)).sources
        reported = {source.name: {name: channel.tolist() for name, channel in source.readers.items()} for source in sources}
        assert reported == {"norm": {"up": rows(0, 6), "router": rows(0, 6)}, "up": {"down": [3, 1, 0, 2]}}
        for source in sources:
            fold(dict(block.named_modules()), source)
        assert apart(y, block(x)) <= 1e-5


def test_a_run_that_differs_in_its_last_bits_each_time_is_seen_through():
    class Shaky(MadeUp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + 1e-7 * y.abs().max() * torch.randn_like(y)

    block = Shaky(6, 4, "relu", False, 1, [0, 1, 2, 3], False, 1)
    bare = Shaky(6, 4, "relu", False, 1, [0, 1, 2, 3], True, 1)
    x = torch.randn(20, 6)
    with torch.no_grad():
        assert {source.name for source in find_readers(dict(block.named_modules()), lambda: block(x)).sources} == {"norm", "up"}
        assert {source.name for source in find_readers(dict(bare.named_modules()), lambda: bare(x)).sources} == {"up"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_block_like_another_is_told_by_its_example(name):
    """In three runs, and anew where the example does not hold."""
    path, expected = SOURCES[name]
    model = stirred(architectures.build(name))
    first, run = first_block(model, path)
    second, other = first_block(model, f"{path[:-1]}1")
    count = []

    def counted() -> Any:
        count.append(1)
        return other()

    with torch.no_grad():
        example = find_readers(dict(first.named_modules(prefix=path)), run).renamed(
            lambda name: name.replace(path, f"{path[:-1]}1")
        )
        modules = dict(second.named_modules(prefix=f"{path[:-1]}1"))
        found = find_readers(modules, counted, example=example)
        few = len(count)
        whole = find_readers(modules, counted)
    assert {s.name.removeprefix(f"{path[:-1]}1.") for s in found.sources} == set(expected)
    assert few == 3 < len(count) / 4
    assert [s.name for s in found.sources] == [s.name for s in whole.sources]
    assert found.excluded == whole.excluded
    for a, b in zip(found.sources, whole.sources, strict=True):
        assert all(torch.equal(channel, b.readers[reader]) for reader, channel in a.readers.items())
    wrong = replace(example, sources=tuple(replace(s, readers=dict(list(s.readers.items())[1:])) for s in example.sources))
    with torch.no_grad():
        assert {s.name for s in find_readers(modules, other, example=wrong).sources} == {s.name for s in whole.sources}


def test_patterns_put_stars_for_whole_numbers():
    assert pattern("model.layers.11.mlp.experts.3.w2") == "model.layers.*.mlp.experts.*.w2"
    assert pattern("0.fc1") == "*.fc1"
