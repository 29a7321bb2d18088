"""Data loaders with workers of every kind, forked children, and event loops, while this process uses the device."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os

import pytest
import torch
from simulated_marks import forks
from torch.utils.data import DataLoader, TensorDataset

import djinn

TYPE = "remote_accelerator"

SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((3,), float(i)), i

def total(method, scale):
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=method, pin_memory=True)
    batches = list(loader)
    assert all(batch.is_pinned() and index.is_pinned() for batch, index in batches)
    return sum((batch.to("remote_accelerator", non_blocking=True) * scale).sum().item() for batch, _ in batches)

if __name__ == "__main__":
    import djinn  # workers do without
    scale = torch.ones(3, device="remote_accelerator") * 2
    assert scale.sum().item() == 6
    for method in ("spawn", "forkserver"):
        assert total(method, scale) == 6 * sum(range(8)), method
    print("done")
"""


def test_data_loader_workers_run_while_parent_uses_device(tmp_path, python, served_environment):
    script = tmp_path / "loading.py"
    script.write_text(SCRIPT)
    done = python.run("-W", "error", script, env=served_environment, finalize=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@forks
def test_forked_workers_yield_pinned_batches(embedded):
    scale = torch.ones(1, device=TYPE) * 2
    assert scale.item() == 2
    loader = DataLoader(
        TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2, multiprocessing_context="fork", pin_memory=True
    )
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert [(batch.to(TYPE) * scale).sum().item() for batch in batches] == [12, 44]


class AugmentedDataset(torch.utils.data.Dataset):
    """A data set with modules as transforms, as in torchvision."""

    def __init__(self):
        self.transform = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)).requires_grad_(False)

    def __len__(self):
        return 2

    def __getitem__(self, i):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            return self.transform(torch.ones(4))


@forks
def test_forked_workers_run_cpu_modules(embedded):
    assert torch.ones(1, device=TYPE).item() == 1
    data = AugmentedDataset()
    here = torch.stack([data[0], data[1]])
    there = next(iter(DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")))
    assert torch.equal(here, there)


class UsesTheDevice(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.ones(2, device=TYPE) * i


@forks
def test_forked_worker_using_device_raises(embedded):
    assert torch.ones(1, device=TYPE).item() == 1
    batches = iter(DataLoader(UsesTheDevice(), num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(RuntimeError, match=r"(?s)__getitem__.*forked.*'spawn'"):
        next(batches)
    batches._shutdown_workers()  # not when it is collected, which would be in the middle of another test


@forks
def test_forked_child_is_recognised(embedded):
    kept = torch.ones(1, device=TYPE)
    assert kept.item() == 1
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        module = torch.remote_accelerator
        said = [module.is_available(), module._is_in_bad_fork()]
        torch.manual_seed(1)  # must not touch the device
        for use in (
            lambda: kept + 1,
            lambda: torch.ones(1, device=TYPE),
            module.synchronize,
            module.init,
            lambda: str(kept),
        ):
            try:
                said.append(use())
            except RuntimeError as error:
                said.append(isinstance(error, djinn.errors.SessionLost))
        os.write(writing, repr(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read() == repr([False, True, True, True, True, True, True])
    assert (kept + 1).item() == 2


def test_remote_tensors_cannot_be_sent_to_processes(embedded):
    context = multiprocessing.get_context("spawn")
    for shared in (torch.ones(3, device=TYPE), torch.nn.Linear(2, 2).to(TYPE)):
        process = context.Process(target=print, args=(shared,))
        with pytest.raises(djinn.errors.UnsupportedOperation, match=r"another process.*cpu"):
            process.start()


@forks
def test_process_pool_reports_remote_tensor_to_submitter(embedded):
    """The pool continues afterwards."""
    tensor = torch.ones(3, device=TYPE)
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.raises(djinn.errors.UnsupportedOperation, match=r"another process.*cpu"):
            pool.submit(len, tensor).result(timeout=60)
        assert pool.submit(len, tensor.cpu()).result(timeout=60) == 3


def test_asyncio_tasks_and_threads_share_device(embedded):
    x = torch.ones(3, device=TYPE)

    async def work(n):
        await asyncio.sleep(0)
        here = (x * n).sum().item()
        there = await asyncio.to_thread(lambda: (x * n + 1).sum().item())
        return here, there

    async def main():
        return await asyncio.gather(*[work(n) for n in range(5)])

    assert asyncio.run(main()) == [(3 * n, 3 * n + 3) for n in range(5)]
