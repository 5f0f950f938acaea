"""States of sharded models go from one number of processes to another; policies of FSDP2; what FSDP1 and others refuse."""

from __future__ import annotations

import gc
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from lowbit import QTensor
from tests.ecosystem.test_processes import Adapted, X, layer

SCHEMES = ("int4", "int3_g48", "nf4", "nvfp4", "mxfp4", "int8")
WAYS = ("memory", "saved by two", "saved by one", "whole state", "policy", "CPU offload", "not resharded", "FSDP1")


def model(scheme: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(layer(scheme, 96, 64)), nn.ReLU(), Adapted(layer(scheme, 64, 96)))


def outputs(of: nn.Module) -> Tensor:
    with torch.no_grad():
        return of(X)


def quantized(of: nn.Module) -> list[QTensor]:
    local = [p.to_local() if hasattr(p, "to_local") else p for p in of.parameters()]
    return [p for p in local if isinstance(p, QTensor)]


def written(state: dict[str, Any], folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of there being one process
        dcp.save(state, checkpoint_id=folder)


def read(state: dict[str, Any], folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)


class Shared:
    """What each process does; the answers say how far it is from one process, or what was said."""

    def __init__(self, mesh: Any, folder: str) -> None:
        self.mesh, self.folder = mesh, folder

    def sharded(self, scheme: str, seed: int = 0, **policies: Any) -> nn.Sequential:
        from torch.distributed.fsdp import fully_shard

        made = model(scheme, seed)
        for block in (made[0], made[2], made):
            fully_shard(block, mesh=self.mesh, **policies)
        return made

    def memory(self, scheme: str) -> float:
        """Half of all parts but the scale of a whole weight, before and after a step; nothing that was gathered stays."""
        whole = quantized(model(scheme))
        made = self.sharded(scheme)
        wanted = sum((q.nbytes - (4 if q.outer is not None else 0)) // 2 for q in whole)
        before = _bytes_of_codes()
        more = []
        for _ in range(4):  # what a step still holds while gloo's threads end it is gone after another
            made(X).sum().backward()
            more.append(_bytes_of_codes() - before)
        assert sum(q.nbytes - (4 if q.outer is not None else 0) for q in quantized(made)) == wanted
        return float(min(more))

    def saved_by_two(self, scheme: str) -> float:
        made, other = self.sharded(scheme), self.sharded(scheme, seed=1)
        written({"model": get_model_state_dict(made)}, f"{self.folder}/two {scheme}")
        return self._loaded(other, f"{self.folder}/two {scheme}", outputs(made))

    def saved_by_one(self, scheme: str) -> float:
        return self._loaded(self.sharded(scheme, seed=1), f"{self.folder}/one {scheme}", outputs(self.sharded(scheme)))

    @staticmethod
    def _loaded(other: nn.Module, folder: str, wanted: Tensor) -> float:
        assert not torch.equal(outputs(other), wanted)
        state = {"model": get_model_state_dict(other)}
        read(state, folder)
        set_model_state_dict(other, state["model"])
        return float((outputs(other) - wanted).abs().max())

    def whole_state(self, scheme: str) -> float:
        made, alone = self.sharded(scheme), model(scheme)
        for offload in (False, True):
            state = get_model_state_dict(made, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
            if state:  # of the first process alone, where it goes to the CPU
                assert state.keys() == alone.state_dict().keys()
                assert all(torch.equal(value, state[name]) for name, value in alone.state_dict().items())
        other = self.sharded(scheme, seed=1)
        set_model_state_dict(other, alone.state_dict(), options=StateDictOptions(full_state_dict=True))
        return float((outputs(other) - outputs(alone)).abs().max())

    def policy(self, scheme: str) -> float:
        """Products in bfloat16 of weights that are float32 to those who look, whose codes and scales stay."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        made, alone = self.sharded(scheme, mp_policy=policy), model(scheme).bfloat16()
        y, wanted = made(X), alone(X.bfloat16()).float()
        for each in (y, wanted):
            each.square().mean().backward()
        grad = made[0].up.weight.grad.full_tensor()
        assert y.dtype == grad.dtype == torch.float32
        rows = [q.chunk(2)[self.mesh.get_local_rank()] for q in quantized(model(scheme))]
        assert all(torch.equal(mine, part) for mine, part in zip(quantized(made), rows, strict=True))
        assert {q.dtype for q in quantized(made)} == {torch.float32}
        return float(max((y - wanted).abs().max(), (grad - alone[0].up.weight.grad).abs().max()).detach())

    def cpu_offload(self, scheme: str) -> float:
        from torch.distributed.fsdp import CPUOffloadPolicy

        made = self.sharded(scheme, offload_policy=CPUOffloadPolicy(pin_memory=False))
        return float((outputs(made) - outputs(model(scheme))).abs().max())

    def not_resharded(self, scheme: str) -> float:
        made = self.sharded(scheme, reshard_after_forward=False)
        outputs(made)
        return float((outputs(made) - outputs(model(scheme))).abs().max())

    def fsdp1(self, scheme: str) -> str:
        from torch.distributed.fsdp import FullyShardedDataParallel

        bare = nn.Module()
        bare.weight = nn.Parameter(QTensor.quantize(torch.randn(96, 64), scheme), requires_grad=False)
        said = ""
        for made in (model(scheme), bare):
            try:
                FullyShardedDataParallel(made, device_id=torch.device("cpu"), use_orig_params=True)
            except (TypeError, ValueError) as error:
                said += str(error)
        return said


def _bytes_of_codes() -> int:
    """Those of all plain uint8 tensors that live, each storage once."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.dtype == torch.uint8]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def run(rank: int, world: int, port: int, folder: str, reported: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    gc.freeze()  # what is here already is not looked at again and again
    shared = Shared(init_device_mesh("cpu", (world,)), folder)
    for scheme in SCHEMES:
        for way in WAYS:
            try:
                found = getattr(shared, way.lower().replace(" ", "_"))(scheme)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            reported.put((way, scheme, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("states")
    for scheme in SCHEMES:
        written({"model": model(scheme).state_dict()}, f"{made}/one {scheme}")
    return made


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[tuple[str, str], list[Any]]:
    """What both processes found: starting them takes longer than all that they do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reported = mp.get_context("spawn").Queue()
    processes = mp.spawn(run, args=(2, port, str(folder), reported), nprocs=2, join=False)
    found: dict[tuple[str, str], list[Any]] = {}
    for _ in range(2 * len(SCHEMES) * len(WAYS)):
        way, scheme, what = reported.get(timeout=240)
        found.setdefault((way, scheme), []).append(what)
    processes.join()
    return found


CELLS = {
    "memory": ("FSDP2", "half of the bytes a process"),
    "saved by two": ("torch", "distributed checkpoints (DCP)"),
    "saved by one": ("torch", "distributed checkpoints (DCP), 1 process to 2"),
    "whole state": ("FSDP2", "full state dict"),
    "policy": ("FSDP2", "mixed precision policy"),
    "CPU offload": ("FSDP2", "CPU offload policy"),
    "not resharded": ("FSDP2", "frozen base with adapters"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.works_with(*cell)) for way, cell in CELLS.items()])
def test_shards_are_what_one_process_has(answers: dict[Any, list[Any]], way: str, scheme: str) -> None:
    for worst in answers[way, scheme]:
        assert isinstance(worst, float), worst
        assert worst < 1e-5


@pytest.mark.works_with("FSDP1", "refused, naming FSDP2")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_flat_parameters_are_refused(answers: dict[Any, list[Any]], scheme: str) -> None:
    for said in answers["FSDP1", scheme]:
        assert said.count("use torch.distributed.fsdp.fully_shard (FSDP2)") == 2, said


@pytest.mark.works_with("torch", "distributed checkpoints (DCP), 2 processes to 1")
@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_two_processes_saved_is_read_by_one(folder: Path, scheme: str) -> None:
    other = model(scheme, seed=1)
    state = {"model": other.state_dict()}
    read(state, f"{folder}/two {scheme}")
    other.load_state_dict(state["model"])
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model(scheme).state_dict().items())
    assert torch.equal(outputs(other), outputs(model(scheme)))


@pytest.mark.works_with("torch", "distributed checkpoints (DCP)")
def test_a_checkpoint_of_another_scheme_is_refused(folder: Path) -> None:
    other = model("int8")
    with pytest.raises(dcp.api.CheckpointException, match="needs one scheme and orientation"):
        read({"model": other.state_dict()}, f"{folder}/one nf4")
