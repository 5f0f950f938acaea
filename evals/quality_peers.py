"""What other libraries make of a model, as float weights that the harness of :mod:`lowbit.evals.quality` can measure.

    PEER/bin/python evals/quality_peers.py llmcompressor-gptq int3 --model FOLDER --text FILE --out FOLDER

Runs by itself in an environment where the peer is installed (lowbit need not be), on the CPU and in float32, the best that
each can do. Every linear layer but the head is quantized, in groups along K and with a zero point where the peer has one;
those that look at data see ``--rows`` rows of ``--length`` tokens of the text, tokenized in one piece. ``OUT/PEER-SCHEME``
then holds ``model.safetensors`` with the numbers that the codes stand for, ``peer.json``, and, where inputs are multiplied
by something before they are quantized, ``inputs.safetensors``. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["PEERS", "SCHEMES", "PeerResult", "Peer", "Scheme", "make"]


class Scheme(NamedTuple):
    """Integers of ``bits`` in groups of ``group`` along K (-1: a whole row); ``activation``: inputs are int8 per token."""

    bits: int
    group: int
    activation: bool = False


SCHEMES = {"int4": Scheme(4, 128), "int3": Scheme(3, 128), "int2": Scheme(2, 64), "w8a8": Scheme(8, -1, activation=True)}


class PeerResult(NamedTuple):
    """What a peer did: bits a weight beside those of the code (scale, zero point) for each group, and factors of inputs."""

    bits_a_group: int
    inputs: dict[str, Tensor] | None = None


Make = Callable[[nn.Module, Tensor, Scheme], PeerResult]


class Peer(NamedTuple):
    """``make(model, ids, scheme)`` replaces the model's weights by quantized ones. ``package``: what it needs."""

    package: str
    schemes: tuple[str, ...]
    make: Make


WEIGHTS = ("int4", "int3", "int2")


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer but the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


# ---- hqq -------------------------------------------------------------------------------------------------------------


def _hqq(model: nn.Module, ids: Tensor, scheme: Scheme) -> PeerResult:
    from hqq.core.quantize import Quantizer

    for layer in _linears(model).values():
        codes, meta = Quantizer.quantize(
            layer.weight.data, nbits=scheme.bits, group_size=scheme.group, axis=1, device="cpu", compute_dtype=torch.float32
        )
        meta["compute_dtype"] = torch.float32
        layer.weight.data = Quantizer.dequantize(codes, meta).reshape(layer.weight.shape)
    return PeerResult(16 + 16)  # its zero point is a float


# ---- torchao ---------------------------------------------------------------------------------------------------------


def _intx(scheme: Scheme, symmetric: bool, algorithm: str) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup

    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{scheme.bits}"),
        granularity=PerGroup(scheme.group),
        mapping_type=MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC,
        intx_choose_qparams_algorithm=algorithm,
    )


def _torchao_hqq(model: nn.Module, ids: Tensor, scheme: Scheme) -> PeerResult:
    from torchao.quantization import quantize_

    layers = _linears(model)
    quantize_(model, _intx(scheme, True, "hqq_scale_only"), filter_fn=lambda module, name: name in layers)
    for layer in layers.values():
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return PeerResult(16)


def _torchao_awq(model: nn.Module, ids: Tensor, scheme: Scheme) -> PeerResult:
    """Its search over scales, on top of its affine integers; the inputs of a layer are divided by what it finds."""
    from torchao.prototype.awq.core import AWQObserver
    from torchao.quantization import quantize_

    layers, made = _linears(model), {}
    config = _intx(scheme, False, "affine")
    for name, layer in layers.items():  # one at a time: an observer keeps every input
        observer = AWQObserver(layer.weight, layer.bias, config)
        hook = layer.register_forward_hook(lambda module, args, output, observer=observer: observer(args[0], output))
        _run(model, ids)
        hook.remove()
        observer.inputs = [x.flatten(0, -2) for x in observer.inputs]
        scales = observer.calculate_qparams()
        scaled = nn.Sequential(nn.Linear(*layer.weight.T.shape, bias=False))
        scaled[0].weight.data = layer.weight * scales
        quantize_(scaled, config)
        made[name] = scaled[0].weight.dequantize() / scales
    for name, layer in layers.items():
        layer.weight.data = made[name]
    return PeerResult(16 + scheme.bits)


def _torchao_smoothquant(model: nn.Module, ids: Tensor, scheme: Scheme) -> PeerResult:
    from torchao.prototype.smoothquant import SmoothQuantConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    layers = _linears(model)
    base = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    for step in ("prepare", "convert"):
        config = SmoothQuantConfig(base_config=base, step=step, alpha=0.5, use_running_absmax=True)
        quantize_(model, config, filter_fn=lambda module, name: name in layers)
        if step == "prepare":
            _run(model, ids)
    inputs = {}
    for name in layers:
        layer = model.get_submodule(name)
        inputs[name] = layer.weight.act_pre_scale.clone()
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return PeerResult(16, inputs)


# ---- llm-compressor --------------------------------------------------------------------------------------------------


def _llmcompressor(method: str) -> Make:
    def make(model: nn.Module, ids: Tensor, scheme: Scheme) -> PeerResult:
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from datasets import Dataset
        from llmcompressor import oneshot

        if not torch.accelerator.is_available():  # its cache of inputs asks for one, to pin memory for
            from llmcompressor.pipelines.cache import IntermediatesCache

            IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)
        rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
        oneshot(
            model=model, dataset=rows, recipe=_modifiers(method, scheme), max_seq_length=ids.shape[1],
            num_calibration_samples=len(ids), batch_size=8, shuffle_calibration_samples=False,
        )  # fmt: skip
        count = 0
        for layer in _linears(model).values():
            weights = layer.quantization_scheme.weights
            found = fake_quantize(layer.weight.data, layer.weight_scale, layer.weight_zero_point, weights)
            layer.weight.data, count = found.float(), count + 1
        assert count
        return PeerResult(16 if scheme.activation else 16 + scheme.bits)

    return make


def _modifiers(method: str, scheme: Scheme) -> list[Any]:
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    group: dict[str, Any] = {"strategy": "channel"} if scheme.group < 0 else {"strategy": "group", "group_size": scheme.group}
    weights = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.activation, **group}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    found = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if scheme.activation else None}
    where: dict[str, Any] = {"config_groups": {"all": found}, "ignore": ["lm_head"]}
    return {
        "rtn": lambda: [QuantizationModifier(**where)],
        "gptq": lambda: [GPTQModifier(**where)],
        "awq": lambda: [AWQModifier(), QuantizationModifier(**where)],
        "awq-gptq": lambda: [AWQModifier(), GPTQModifier(**where)],
        "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.5), QuantizationModifier(**where)],
        "autoround": lambda: [AutoRoundModifier(**where, enable_torch_compile=False)],
    }[method]()


# ----------------------------------------------------------------------------------------------------------------------

PEERS: dict[str, Peer] = {
    "hqq": Peer("hqq", WEIGHTS, _hqq),
    "torchao-hqq": Peer("torchao", WEIGHTS, _torchao_hqq),
    "torchao-awq": Peer("torchao", WEIGHTS, _torchao_awq),
    "torchao-smoothquant": Peer("torchao", ("w8a8",), _torchao_smoothquant),
    **{
        f"llmcompressor-{method}": Peer("llmcompressor", WEIGHTS, _llmcompressor(method))
        for method in ("rtn", "gptq", "awq", "awq-gptq", "autoround")
    },
    "llmcompressor-smoothquant": Peer("llmcompressor", ("w8a8",), _llmcompressor("smoothquant")),
    "llmcompressor-w8a8": Peer("llmcompressor", ("w8a8",), _llmcompressor("rtn")),
}
"""Every peer by name. torchao's GPTQ is not among them: it asks for a CUDA device."""


@torch.no_grad()
def _run(model: nn.Module, ids: Tensor) -> None:
    for batch in ids.split(8):
        model(batch, use_cache=False)


def _ids(folder: Path, text: Path, rows: int, length: int) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with text.open(encoding="utf-8") as file:
        found = tokenizer(file.read(16 * rows * length), add_special_tokens=False, verbose=False)["input_ids"]
    if len(found) < rows * length:
        raise SystemExit(f"{text} holds {len(found)} tokens, and {rows} rows of {length} were asked for: take a longer text")
    return torch.tensor(found[: rows * length]).view(rows, length)


def make(name: str, scheme_name: str, folder: Path, text: Path, out: Path, rows: int, length: int) -> Path:
    """The folder with what the peer ``name`` makes of the model in ``folder`` under a scheme of :data:`SCHEMES`."""
    import safetensors.torch
    import transformers

    peer, scheme, target = PEERS[name], SCHEMES[scheme_name], out / f"{name}-{scheme_name}"
    if scheme_name not in peer.schemes:
        raise SystemExit(f"{name} is measured under {', '.join(peer.schemes)}, got {scheme_name}")
    if (target / "peer.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = set(model.state_dict()) - {"lm_head.weight"}
    ids = _ids(folder, text, rows, length)
    start = time.perf_counter()
    made = peer.make(model, ids, scheme)
    seconds = time.perf_counter() - start
    after = {key: tensor for key, tensor in model.state_dict().items() if key in names}
    for file, tensors in {"model": after, "inputs": made.inputs}.items():
        if tensors:
            plain = {key: tensor.float().contiguous() for key, tensor in tensors.items()}
            safetensors.torch.save_file(plain, target / f"{file}.safetensors")
    weights = [layer.weight for layer in _linears(model).values()]
    groups = sum(w.shape[0] * -(-w.shape[1] // (scheme.group if scheme.group > 0 else w.shape[1])) for w in weights)
    facts = {
        "peer": name, "version": f"{peer.package} {importlib.metadata.version(peer.package)}", "scheme": scheme_name,
        "bits_per_weight": scheme.bits + made.bits_a_group * groups / sum(w.numel() for w in weights),
        "int8_inputs": scheme.activation, "rows": rows, "length": length, "seconds": seconds,
    }  # fmt: skip
    partial = target / "peer.json.part"
    partial.write_text(json.dumps(facts, indent=1) + "\n")
    os.replace(partial, target / "peer.json")
    return target


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Quantize a model by another library and keep its weights as floats.")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("scheme", choices=SCHEMES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file to calibrate on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    o = parser.parse_args(arguments)
    print(make(o.peer, o.scheme, o.model, o.text, o.out, o.rows, o.length))


if __name__ == "__main__":
    main()
