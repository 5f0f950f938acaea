"""Quantized weights shared by processes: fully_shard, tensor parallel layers and DDP give what one process gives."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lowbit import QLinear, QTensor, Scheme

SCHEMES = ("int4", "int4_g32", "int3_g48", "int8", "nf4", "nvfp4", "mxfp4", "fp8")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(7))


class Adapted(nn.Module):
    """A frozen quantized layer and a low-rank adapter beside it."""

    def __init__(self, base: QLinear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def layer(scheme: str, n: int, k: int, activation: str | None = None) -> QLinear:
    rounds = None if activation is None else Scheme.parse(activation)
    bias = nn.Parameter(torch.randn(n), requires_grad=False)
    return QLinear(QTensor.quantize(torch.randn(n, k) / k**0.5, scheme), bias, rounds)


def steps(model: nn.Module, count: int = 3) -> Tensor:
    """The outputs of some training steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    found = []
    for _ in range(count):
        y = model(X)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(y.detach())
    return torch.stack(found)


# ---- what each process does ----------------------------------------------------------------------------------------


def fully_sharded(mesh: Any, scheme: str) -> float:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(Adapted(layer(scheme, 96, 64)), nn.ReLU(), Adapted(layer(scheme, 64, 96)))
    alone = copy.deepcopy(model)
    for block in (model[0], model[2], model):
        fully_shard(block, mesh=mesh)
    held = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p.to_local(), QTensor))
    assert held <= 0.6 * sum(p.nbytes for p in alone.parameters() if isinstance(p, QTensor))
    return float((steps(model) - steps(alone)).abs().max())


def uneven(mesh: Any) -> str:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Adapted(layer("int4", 65, 64)), mesh=mesh)
    try:
        model(X)
    except ValueError as error:
        return str(error)
    return ""


SHAPES = ((4, 64), (64,), (1, 1, 64), (2, 3, 64))


def tensor_parallel(mesh: Any, scheme: str, activation: str | None) -> float:
    """How far outputs, and gradients of x and of a bias, are from those of one process."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(layer(scheme, 128, 64, activation), nn.ReLU(), layer(scheme, 64, 128))
    for part in (model[0], model[2]):
        part.bias.requires_grad_()
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight.to_local().shape == (64, 64)
    worst = 0.0
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            worst = max(worst, float((model(x) - alone(x)).abs().max()))
        ours, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        model.zero_grad()
        alone.zero_grad()
        for each, given in ((model, ours), (alone, wanted)):
            each(given).square().sum().backward()
        pairs = [(ours.grad, wanted.grad)]
        pairs += [(model[i].bias.grad.full_tensor(), alone[i].bias.grad) for i in (0, 2)]
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return worst


def refused(mesh: Any) -> list[str]:
    """What cannot be shared says why, in every process."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = []
    for made, plan in (
        (layer("int4", 65, 64), ColwiseParallel()),
        (layer("int4", 64, 66), RowwiseParallel()),
        (layer("int8", 64, 64, "int8"), RowwiseParallel()),
    ):
        try:
            parallelize_module(made, mesh, plan)(X[:, : made.in_features])
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def data_parallel(scheme: str) -> float:
    model = Adapted(layer(scheme, 64, 64))
    alone = copy.deepcopy(model)
    return float((steps(nn.parallel.DistributedDataParallel(model)) - steps(alone)).abs().max())


def run(rank: int, world: int, port: int, reported: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    tasks: dict[Any, Callable[[], Any]] = {("uneven",): lambda: uneven(mesh), ("refused",): lambda: refused(mesh)}
    for scheme in SCHEMES:
        tasks["fully_shard", scheme] = lambda scheme=scheme: fully_sharded(mesh, scheme)
        tasks["DDP", scheme] = lambda scheme=scheme: data_parallel(scheme)
        for activation in (None, "int8"):
            tasks["tensor parallel", scheme, activation] = lambda s=scheme, a=activation: tensor_parallel(mesh, s, a)
    for key, task in tasks.items():
        torch.manual_seed(0)
        try:
            found = task()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        reported.put((rank, key, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers() -> dict[Any, list[Any]]:
    """What both processes found: starting them takes longer than all that they do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    reported = context.Queue()
    processes = mp.spawn(run, args=(2, port, reported), nprocs=2, join=False)
    found: dict[Any, list[Any]] = {}
    for _ in range(2 * (2 + 4 * len(SCHEMES))):
        _, key, what = reported.get(timeout=240)
        found.setdefault(key, []).append(what)
    processes.join()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("fully_shard", marks=pytest.mark.works_with("FSDP2", "frozen base with adapters")),
        pytest.param("DDP", marks=pytest.mark.works_with("DDP", "frozen base with adapters")),
    ],
)
def test_training_an_adapter(answers: dict[Any, list[Any]], way: str, scheme: str) -> None:
    for worst in answers[way, scheme]:
        assert isinstance(worst, float), worst
        assert worst < 1e-5


@pytest.mark.works_with("DTensor", "parallelize_module, rows and columns")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", [None, "int8"])
def test_rows_and_columns(answers: dict[Any, list[Any]], scheme: str, activation: str | None) -> None:
    for worst in answers["tensor parallel", scheme, activation]:
        assert isinstance(worst, float), worst
        assert worst < 1e-5


@pytest.mark.works_with("FSDP2", "rows that do not divide: refused")
def test_what_cannot_be_shared_evenly(answers: dict[Any, list[Any]]) -> None:
    for text in answers["uneven",]:
        assert "has 65 rows, which 2 processes cannot share evenly" in text
    for rows, columns, rounded in answers["refused",]:
        assert "cannot be padded" in rows
        assert "multiples of" in columns
        assert "with a scale for all columns of a token" in rounded


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", ["canonical", "interleaved", "mma_fragment"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_gathered_of_every_layout_is_the_weight(scheme: str, layout: str, count: int) -> None:
    """Some layouts have parts that hold nothing, which torch cannot unflatten."""

    class Mesh:
        def size(self) -> int:
            return count

    weight = QTensor.quantize(torch.randn(256, 96), scheme).to_layout(layout)
    shards = list(weight.chunk(count))
    asked = [shard.fsdp_pre_all_gather(Mesh(), weight.shape, weight.stride(), None, None) for shard in shards]
    assert all(part.numel() for sent, _ in asked for part in sent)
    gathered = [torch.cat(parts) for parts in zip(*(sent for sent, _ in asked), strict=True)]
    whole, _ = shards[0].fsdp_post_all_gather(gathered[:1] if count == 1 else gathered, asked[0][1], weight.dtype)
    assert torch.equal(whole, weight)
