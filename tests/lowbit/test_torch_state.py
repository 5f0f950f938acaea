"""What a program has set for all of torch does not show in the bytes of a quantized model, and is there afterwards."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lowbit
from lowbit import QTensor, Recipe, doctor, fuse_, load, quantize_, quantize_folder, rewrite_, save, sensitivity
from lowbit.algorithms import ROUNDERS
from lowbit.rewrites import REWRITES
from lowbit.scales import choose
from lowbit.scheme import SCHEMES
from lowbit.statistics import Statistics
from lowbit.torch_state import default_device, isolated
from lowbit_kernels import reference
from tests.support.strategies import schemes, seeds, weights
from tests.support.torch_states import STATES, entered, snapshot

states = pytest.mark.parametrize("state", STATES)
some_states = st.lists(st.sampled_from(sorted(STATES)), min_size=1, max_size=5, unique=True)
every_scheme = st.one_of(schemes(), st.sampled_from(sorted(SCHEMES.values(), key=str)))
EVERYTHING = ("default dtype bfloat16", "set_default_device meta", "autocast float16", "function mode", "inference mode")


def tiny(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


IDS = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(1))


def all_methods() -> Recipe:
    """Every rounder, each on a layer of its own, under schemes that differ in everything, behind every rewrite."""
    linears = ("*q_proj", "*k_proj", "*v_proj", "*o_proj", "*gate_proj", "*up_proj")
    kinds = ("int3", "nvfp4", "mxfp4", "nf4", "int4_g32", "ternary")
    assert len(ROUNDERS) <= len(linears)
    mapping = {name: f"{rounder}({kind})" for name, rounder, kind in zip(linears, ROUNDERS, kinds, strict=False)}
    recipe = Recipe.of({**mapping, "*": "gptq(int8_static_activation_int8_weight, asymmetric=true)"})
    for name in REWRITES:
        recipe = recipe.rewritten(name, **{"awq": {"grid": 2}}.get(name, {}))
    return recipe


def contents(model: nn.Module) -> dict[str, Any]:
    """All that the model is: bytes, dtypes, modes, gradients."""
    found: dict[str, Any] = {name: raw(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    found |= {f"{name} wants gradients": tensor.requires_grad for name, tensor in model.named_parameters()}
    return found | {f"{name} trains": module.training for name, module in model.named_modules()}


def raw(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    with isolated():
        plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        return tensor.dtype, tuple(tensor.shape), plain.clone().numpy().tobytes()


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized() -> dict[str, Any]:
    """What quantize_ makes of the model where nothing is set."""
    model = tiny()
    quantize_(model, all_methods(), calibration=IDS)
    return contents(model)


@states
def test_quantize(state, quantized):
    model = tiny()
    with entered(state):
        before = snapshot()
        quantize_(model, all_methods(), calibration=IDS)
        assert snapshot() == before
    assert contents(model) == quantized


def test_quantize_in_all_states_at_once(quantized):
    model = tiny()
    with entered(*EVERYTHING):
        before = snapshot()
        quantize_(model, all_methods(), calibration=IDS)
        assert snapshot() == before
    assert contents(model) == quantized


def test_the_models_own_state_does_not_show_and_stays(quantized):
    """Training mode, frozen parameters; and a model whose parameters were made in inference mode."""
    model = tiny().train()
    model.model.norm.eval()
    model.model.embed_tokens.requires_grad_(False)
    quantize_(model, all_methods(), calibration=IDS)
    assert model.training and not model.model.norm.training  # noqa: PT018
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.model.norm.weight.requires_grad
    for name, module in model.named_modules():
        assert module.training == (name != "model.norm")
    assert bytes_alone(contents(model)) == bytes_alone(quantized)
    with torch.inference_mode():
        model = tiny()
    quantize_(model, all_methods(), calibration=IDS)
    assert bytes_alone(contents(model)) == bytes_alone(quantized)


def bytes_alone(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if isinstance(value, tuple)}


def test_states_are_back_after_an_error():
    model = tiny()
    with entered(*EVERYTHING):
        before = snapshot()
        with pytest.raises(IndexError):
            quantize_(model, all_methods(), calibration=[[1, 2, 77]])
        assert snapshot() == before


class Noisy(nn.Module):
    """A layer that reads the model's own random numbers, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x + torch.randn(x.shape)))


def test_random_numbers_of_a_model_are_the_same_ones_each_time():
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = Noisy()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        quantize_(model, "gptq(int3)", calibration=[torch.ones(30, 12)])
        assert torch.equal(torch.get_rng_state(), before)
        found.append(contents(model))
    assert found[0] == found[1]


def test_data_that_shuffles_itself_follows_the_programs_seed():
    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(torch.arange(16.0)[:, None], shuffle=True)
        return [int(batch.args[0]) for batch in lowbit.Calibration(loader).batches(nn.Linear(1, 1))]

    assert order(1) == order(1)
    assert order(1) != order(2)


# ---- every other call ------------------------------------------------------------------------------------------------


def everything(models: list[nn.Module], folder: Path, source: Path) -> dict[str, Any]:
    """What each call makes of equal ``models``, as bytes and figures; ``folder`` is for its files."""
    recipe = all_methods()
    found: dict[str, Any] = {}
    model, other, original = models
    rewrite_(model, recipe, calibration=IDS)
    found["rewrite_"] = contents(model)
    table = sensitivity(original, IDS, ["gptq(int3)", "int4"], layers=["*down_proj"])
    found["sensitivity"], found["it left"] = table.to_dict(), contents(original)
    model = other
    quantize_(model, recipe, calibration=IDS)
    found["fuse_"] = fuse_(model, IDS)
    found["doctor"] = doctor(model, original, IDS).to_dict()
    save(model, folder / "saved")
    found["save"] = (folder / "saved/model.safetensors").read_bytes()
    found["load"] = contents(load(folder / "saved"))
    quantize_folder(source, folder / "streamed", "gptq(int3)", calibration=IDS)
    found["quantize_folder"] = (folder / "streamed/model.safetensors").read_bytes()
    return found


@pytest.mark.parametrize("together", [EVERYTHING, ("default dtype float16", "autocast bfloat16", "matmul precision medium")])
def test_every_call_that_makes_bytes_or_figures(tmp_path, together):
    tiny().save_pretrained(tmp_path / "source")
    models = [tiny() for _ in range(6)]
    plain = everything(models[:3], tmp_path / "plain", tmp_path / "source")
    with entered(*together):
        before = snapshot()
        found = everything(models[3:], tmp_path / "states", tmp_path / "source")
        assert snapshot() == before
    for name, wanted in plain.items():
        assert found[name] == wanted, name


def test_config_while_loading(tmp_path):
    tiny().save_pretrained(tmp_path)

    def loaded() -> dict[str, Any]:
        return contents(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lowbit.Config("hqq(int4)")))

    plain = loaded()
    with entered("default dtype bfloat16", "autocast float16", "no gradients", "matmul precision medium"):
        assert loaded() == plain


# ---- rounders and what they are made of ------------------------------------------------------------------------------


@pytest.mark.parametrize("rounder", ROUNDERS)
@settings(max_examples=12)
@given(w=weights(largest=1e4), scheme=every_scheme, seed=seeds, together=some_states)
def test_rounders(rounder, w, scheme, seed, together):
    assume(fits(w, scheme))
    x = torch.randn(40, w.shape[1], generator=torch.Generator().manual_seed(seed))
    plain = ROUNDERS[rounder].round(w, scheme, Statistics.of(x))
    with entered(*together):
        found = ROUNDERS[rounder].round(w, scheme, Statistics.of(x))
    assert parts(found.codes, *found.scales) == parts(plain.codes, *plain.scales)
    assert found.notes == plain.notes


@given(w=weights(largest=1e4), scheme=every_scheme, together=some_states, method=st.sampled_from(["range", "mse"]))
def test_round_to_nearest(w, scheme, together, method):
    """The operator, the reference and what they are made of."""
    assume(fits(w, scheme))

    def made() -> list[Any]:
        q = QTensor.quantize(w, scheme, method=method)
        return parts(
            q.packed, q.scale, q.zero_point, q.outer, q.dequantize(torch.float32), *choose(w, scheme, method),
            *reference.quantize(w, scheme, method),
        )  # fmt: skip

    plain = made()
    with entered(*together):
        assert made() == plain


@states
def test_statistics_of_wide_inputs(state):
    """Wide enough that a library multiplies them, which may be told to do it in bfloat16."""
    x = torch.randn(600, 512, generator=torch.Generator().manual_seed(0))
    plain = Statistics.of(x, float_x=x + 1)
    with entered(state):
        found = Statistics.of(x, float_x=x + 1)
        error = found.output_error(x, x.round())
    assert parts(found.gram, found.absmax, found.drift) == parts(plain.gram, plain.absmax, plain.drift)
    assert error == plain.output_error(x, x.round())


def fits(w: Tensor, scheme: lowbit.Scheme) -> bool:
    try:
        choose(w, scheme)
    except ValueError:
        return False
    return True


def parts(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else raw(tensor) for tensor in tensors]


def test_importing_in_a_state_changes_nothing():
    """What a module makes when it is imported is made as if nothing were set."""
    program = """
import torch, hashlib
x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
with torch.inference_mode():
    import lowbit
    from lowbit.algorithms import ROUNDERS
    from lowbit.statistics import Statistics
    import lowbit.rewrites, lowbit.mixed_precision.trials, lowbit.diagnosis.doctor
    import lowbit.streaming, lowbit.calibration.calibrator
    import lowbit_kernels.reference, lowbit_kernels.cpu, lowbit_kernels.inlined, lowbit_kernels.fused_norm_quant
for rounder in ROUNDERS.values():
    for scheme in ("int3", "nvfp4", "nf4"):
        found = rounder.round(x, lowbit.SCHEMES[scheme], Statistics.of(x))
        print(hashlib.sha256(found.codes.numpy().tobytes()).hexdigest())
"""
    x, wanted = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)), []
    for rounder in ROUNDERS.values():
        for scheme in ("int3", "nvfp4", "nf4"):
            codes = rounder.round(x, SCHEMES[scheme], Statistics.of(x)).codes
            wanted.append(hashlib.sha256(codes.numpy().tobytes()).hexdigest())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == wanted


# ---- the context itself ----------------------------------------------------------------------------------------------


def test_threads_that_overlap():
    """The default dtype is the whole process's: it comes back when the last of them is done."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, torch.dtype] = {}

    def first() -> None:
        with isolated():
            first_in.set()
            assert second_in.wait(30)
        first_out.set()

    with entered("default dtype bfloat16"):
        thread = threading.Thread(target=first)
        thread.start()
        assert first_in.wait(30)
        with isolated():
            second_in.set()
            assert first_out.wait(30)
            seen["inside"] = torch.get_default_dtype()
        thread.join()
        seen["behind"] = torch.get_default_dtype()
    assert seen == {"inside": torch.float32, "behind": torch.bfloat16}


@pytest.mark.parametrize("general", ["tf32", "bf16"])
def test_precisions_that_follow_another_go_on_following_it(general):
    backends: Any = torch.backends
    kept = backends.mkldnn.matmul.fp32_precision
    backends.mkldnn.matmul.fp32_precision = "none"
    try:
        backends.fp32_precision = general
        with isolated():
            assert backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
        assert backends.mkldnn.matmul.fp32_precision == general
        backends.fp32_precision = "none"
        assert backends.mkldnn.matmul.fp32_precision == "none"
    finally:
        backends.fp32_precision = "none"
        backends.mkldnn.matmul.fp32_precision = kept


def test_weights_that_autocast_kept_are_forgotten():
    """A weight that a rewrite changed is not the one that autocast has rounded before."""
    model, x = tiny(), IDS
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        rewrite_(model, "awq(int3)", calibration=IDS)
        inside = model(x).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x).logits, inside)


@pytest.mark.gpu
def test_a_model_that_relies_on_the_default_device():
    class Relying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.layer = nn.Embedding(8, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.places(torch.arange(x.shape[-2])))

    torch.set_default_device("cuda")
    try:
        model = Relying()
        quantize_(model, "gptq(int3)", calibration=[torch.randn(8, 12)])
        with isolated(), default_device(torch.device("cuda")):
            assert torch.empty(0).is_cuda
    finally:
        torch.set_default_device(None)
