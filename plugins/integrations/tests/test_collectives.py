"""Collectives of torch.distributed over two processes, each with its own executor: same results as with CPU tensors."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn_integrations.collectives import Collectives

PROGRAM = """\
import copy
import sys
import djinn
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)


def full(number, device):
    return torch.full((2,), float(number), device=device)


def in_place(device):
    reduced, sent = full(rank + 1, device), full(rank + 1, device)
    dist.all_reduce(reduced)
    dist.broadcast(sent, 1)
    later = full(rank + 1, device)
    dist.all_reduce(later, op=dist.ReduceOp.MAX, async_op=True).wait()
    return [reduced, sent, later]


def into_others(device):
    gathered = [torch.zeros(2, device=device) for _ in range(2)]
    dist.all_gather(gathered, full(rank, device))
    flat = torch.zeros(4, device=device)
    dist.all_gather_into_tensor(flat, full(rank, device))
    summed = torch.zeros(2, device=device)
    dist.reduce_scatter(summed, [full(rank + i, device) for i in range(2)])
    part = torch.zeros(2, device=device)
    dist.scatter(part, [full(i, device) for i in range(2)] if rank == 0 else None, 0)
    exchanged = torch.zeros(2, device=device)
    dist.all_to_all_single(exchanged, full(rank, device))
    return [*gathered, flat, summed, part, exchanged]


def from_one_to_the_other(device):
    tensor = full(rank, device)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    dist.barrier()
    return [tensor]


def without_writing(device):
    return [functional.all_reduce(full(rank + 1, device), "sum", dist.group.WORLD)]


def trained(device):
    torch.manual_seed(rank)  # the first process's weights count
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def divided(device):
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    models = [
        fully_shard(copy.deepcopy(model), mesh=mesh),
        FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device(device)),
    ]
    losses = []
    for sharded in models:
        optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
        for step in range(2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
            loss = sharded(x).square().mean()
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


for function in (in_place, into_others, from_one_to_the_other, without_writing, trained, divided):
    for ours, theirs in zip(function("remote_accelerator:0"), function("cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, msg=lambda text: f"{function.__name__}: {text}")
if rank == 1:
    try:
        dist.recv(torch.zeros(2, device="remote_accelerator:0"))
    except djinn.errors.UnsupportedOperation as error:
        assert "src" in str(error)
    else:
        raise AssertionError("it did not say who sends")
dist.destroy_process_group()
print("equal", rank)
"""


def test_collectives_work_between_two_processes(python, plain_environment, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = plain_environment | {"OMP_NUM_THREADS": "1", "DJINN_THREADS": "1"}
    started = [
        python.start_captured(
            "-W", "ignore", tmp_path / "program.py", str(rank), tmp_path / "group", env=environment, cwd=tmp_path
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(started):
        with process:
            out, err = process.communicate(300)
            assert process.returncode == 0, err
            assert f"equal {rank}" in out


def test_missing_package_error_names_package(embedded, monkeypatch):
    x = torch.ones(2, device=embedded)
    monkeypatch.setattr(Collectives, "name", "another")
    with pytest.raises(djinn.errors.DjinnError, match=r"pip install \./plugins/integrations"):
        torch.ops._c10d_functional.wait_tensor(x)
    monkeypatch.undo()
    assert torch.ops._c10d_functional.wait_tensor(x) is x
