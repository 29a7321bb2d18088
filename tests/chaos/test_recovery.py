"""An executor that is killed takes nothing with it: the next one does again what it did. Real server, real kills."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from compared_layouts import equal, one_of_each, ops_on_each, plain
from servers import start_server

import djinn
from djinn.testing import executor_figures
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_core.protocol.connection_file import read_connection_file

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def journals(tmp_path_factory):
    """Return the directory of the server's session journals."""
    return tmp_path_factory.mktemp("recovery") / "state" / "journals"


@pytest.fixture(scope="module", params=["20", "0"], ids=["journal", "snapshots"])
def server(request, start_python, plain_environment, journals):
    """Yield a server for the tests that kill executors."""
    folder = journals.parents[1]
    options = ["--threads", "1", "--drain-seconds", "1", "--state-dir", str(journals.parent), "--store", str(folder)]
    server = start_server(start_python, folder, *options, "--snapshot-seconds", request.param, env=plain_environment)
    yield read_connection_file(server.file)
    server.stop()
    assert not list(journals.iterdir())  # sessions that ended left none


@pytest.fixture
def remote(server):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    djinn.shut_down()
    djinn.configure(servers=[u for u in server.urls if u.startswith("tcp")], token=server.token, disable=("local",))
    djinn.init()
    yield REMOTE
    djinn.shut_down()
    djinn.configure()
    torch.set_num_threads(threads)


def executor_process():
    """Return the id of the process that executes the session."""
    (status,) = ask_servers(client.settings()).values()
    assert not isinstance(status, Exception), status
    return next(executor.process for executor in status.executors if executor.state == "ready")


class ExecutorKiller(threading.Thread):
    """A thread that kills the session's executor after `after` seconds."""

    def __init__(self, after):
        super().__init__(daemon=True)
        self.after, self.process = after, executor_process()
        self.start()

    def run(self):
        time.sleep(self.after)
        os.kill(self.process, signal.SIGKILL)


def train(device, killed_after=None):
    """Return losses of a few steps with dropout and AdamW."""
    torch.manual_seed(5)
    layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(64, 32).to(device), torch.randint(0, 4, (64,)).to(device)
    torch.manual_seed(6)
    losses = []
    for step in range(40):
        if step == 12 and killed_after is not None:
            ExecutorKiller(killed_after)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 20 and killed_after is not None:
            time.sleep(killed_after)  # so that it has been killed by now
    return losses


def test_training_survives_kills(remote):
    expected = train(remote)
    assert train(remote, killed_after=0.03) == expected


def run_attention_loop(device, process=None):
    """Return the results of a loop with a growing cache that runs ahead. Kill `process` during the loop."""
    torch.manual_seed(7)
    weight = (torch.randn(192, 192) * 0.1).to(device)
    x, cache, found = torch.ones(96, 192).to(device), torch.zeros(1, 192).to(device), []
    for step in range(16):
        for _ in range(6):
            x = torch.tanh(x @ weight)
        cache = torch.cat((cache, x[:2]))
        x = x + torch.softmax(x @ cache.T, -1) @ cache
        found.append(x.sum().item())
        if step == 10 and process is not None:
            assert executor_figures()["runs_ahead"] > 2
        if step == 13 and process is not None:
            os.kill(process, signal.SIGKILL)
    return found


def test_loop_running_ahead_survives_kill(remote):
    assert run_attention_loop(remote, executor_process()) == run_attention_loop("cpu")


def test_in_place_updates_run_once(remote):
    total, one = torch.zeros(1000, device=remote), torch.ones(1000).to(remote)
    killer = None
    for i in range(400):
        total.add_(one)
        if i == 150:
            assert total[0].item() == 151
            killer = ExecutorKiller(0.0)
        if i == 250:
            killer.join()
            djinn.synchronize()
    assert total.tolist() == [400.0] * 1000


def test_uploads_survive_executor_kill(remote, journals):
    large, small = torch.randn(1 << 20), torch.randn(10)
    held, other = large.to(remote), small.to(remote)
    held += 1
    djinn.synchronize()
    for stored in journals.parents[1].glob("??/*"):  # as if the store had made room for others
        stored.unlink(missing_ok=True)
    ExecutorKiller(0.0).join()
    assert torch.equal(held.cpu(), large + 1)
    assert torch.equal((other * 2).cpu(), small * 2)
    ExecutorKiller(0.0).join()  # and once more
    assert torch.equal(held.cpu(), large + 1)


def test_values_without_journal_are_lost(journals, remote):
    value = torch.ones(3, device=remote)
    djinn.synchronize()
    process = executor_process()
    for journal in journals.iterdir():
        journal.unlink()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(djinn.errors.SessionLost, match="no such session"):
        value.cpu()


@pytest.mark.filterwarnings("ignore:(Sparse|.*functions that produce)")
def test_sparse_and_nested_tensors_are_recovered(remote):
    expected = [plain(one_of_each("cpu")), plain(ops_on_each(one_of_each("cpu")))]
    held = one_of_each(remote)
    values = held[0].values() if held[0].is_coalesced() else held[0]._values()
    values.add_(0)  # written after it was made
    djinn.synchronize()
    ExecutorKiller(0.0).join()
    assert equal(plain(held), expected[0])
    ExecutorKiller(0.0).join()
    assert equal(plain(ops_on_each(held)), expected[1])


def test_growing_cache_survives_kill(remote):
    def decode(device, after=None):
        torch.manual_seed(0)
        cache, rows = torch.randn(2, 4, 300, 64).to(device), torch.randn(16, 2, 4, 1, 64).to(device)
        kept, seen = cache, []
        for number, given in enumerate(rows):
            row = given
            for _ in range(4):
                row = torch.tanh(row) * 1.5
            cache = torch.cat((cache, row), 2)
            seen.append(torch.nn.functional.scaled_dot_product_attention(row, cache, cache).sum().item())
            if number == 8:
                kept = cache
                if after is not None:
                    after()
        return [*seen, cache.cpu(), kept.cpu()]

    before = decode("cpu")
    decode(remote)  # from its third run on, the program appends in place
    after = decode(remote, lambda: os.kill(executor_process(), signal.SIGKILL))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(after, before, strict=True))
    for _ in range(5):  # the new executor appends in place after it has loaded the native library
        if not executor_figures()["appended_bytes"]:
            decode(remote)
    assert executor_figures()["appended_bytes"] > 0
