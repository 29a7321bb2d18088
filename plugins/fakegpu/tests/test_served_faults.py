"""Faults of a served device: hung kernels that block the session, and exhausted memory, with a client in this process."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from configured import configured
from servers import SECONDS, started_server

import djinn
from djinn.testing import executor_figures
from djinn_fakegpu.library import build
from djinn_fakegpu.remote_control import RemoteControl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
REMOTE = "remote_accelerator:0"
MIB = 1 << 20


@contextlib.contextmanager
def run_fake_server(start_python, environment, folder, *options):
    build()  # on a busy machine, the build takes longer than the start timeout of an executor
    command = ["-m", "djinn_core.cli", "serve", "--connection-file", folder / "connection.json", "--threads", "1"]
    command += ["--device", "fakegpu:0", "--drain-seconds", "1", *options]
    known = environment | {"DJINN_PLUGIN_FAKEGPU_CONTROL": str(folder)}
    server = started_server(start_python, command, folder, known)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory, start_python, plain_environment):
    folder = tmp_path_factory.mktemp("gpu")
    options = "--hang-seconds", "1", "--state-dir", folder / "state"
    with run_fake_server(start_python, plain_environment, folder, *options) as server:
        yield server


@pytest.fixture
def gpu(server):
    """Yield the device of a new session. Tests can inject faults and limit its memory."""
    control = RemoteControl(server.file.parent)
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
        djinn.init()
        yield control
    control.configure(memory=16 << 30, queue=1024)


def restarts(server):
    return server.log.read_text().count("an executor was restarted")


def test_hung_kernel_before_waiting_op_is_detected(gpu, server):
    x, before = torch.ones(8).to(REMOTE), restarts(server)
    djinn.synchronize()
    gpu.inject("hang", "aten::add")
    with pytest.raises(djinn.errors.DjinnError, match=r"an op at or before aten::nonzero \(op 1 of .*\) hangs"):
        (x + 1).nonzero()
    assert torch.ones(3).to(REMOTE).sum().item() == 3
    assert restarts(server) == before + 1


def test_hung_kernel_with_full_queue_is_detected(gpu):
    x = torch.ones(8).to(REMOTE)
    djinn.synchronize()
    gpu.configure(queue=4)
    gpu.inject("hang", "aten::sin")
    y = x.sin()
    for _ in range(10):
        y = y * 2
    with pytest.raises(djinn.errors.DjinnError, match=r"at or before aten::mul\S* \(op [3-5] of .*\) hangs"):
        y.cpu()
    assert x.sum().item() == 8


def test_hung_copy_restarts_executor(gpu, server):
    x, before = torch.arange(9.0).to(REMOTE), restarts(server)
    djinn.synchronize()
    gpu.inject("hang", "a download")
    assert x.cpu().tolist() == list(range(9))
    assert restarts(server) == before + 1


@pytest.fixture
def small_gpu(gpu):
    """Yield the device, limited to 64 MiB."""
    gpu.configure(memory=64 * MIB)
    return gpu


def make_tensor(mib, value):
    return torch.full((mib * MIB // 4,), float(value)).to(REMOTE)


def test_op_without_memory_runs_after_eviction(small_gpu):
    a, b = make_tensor(20, 1), make_tensor(20, 2)
    c = a + 2
    d = b * c
    assert (c.sum().item(), a.sum().item()) == (15 * MIB, 5 * MIB)
    for _ in range(2):
        assert [int(one[-1]) for one in (a, b, c, d)] == [1, 2, 3, 6]
    assert torch.equal((a * d).cpu(), torch.full((5 * MIB,), 6.0))
    assert small_gpu.counters()["out_of_memory"] > 0
    assert executor_figures()["evictions"] > 0
    assert small_gpu.allocated() <= 64 * MIB


def test_op_without_memory_fails_only_itself(small_gpu, server):
    a, before = make_tensor(8, 1), restarts(server)
    attempts = small_gpu.counters().get("out_of_memory", 0)
    b = a + 1
    too_large = a.repeat(10)
    c = b * 3
    with pytest.raises(torch.OutOfMemoryError, match=r"aten::repeat|fakegpu out of memory"):
        too_large.cpu()
    assert small_gpu.counters()["out_of_memory"] == attempts + 2, "it is tried twice"
    assert c[0].item() == 6
    assert restarts(server) == before


def test_upload_without_memory_evicts_values(small_gpu):
    values = [make_tensor(20, number) for number in range(5)]
    assert [int(value[0]) for value in values] == list(range(5))
    assert executor_figures()["memory_away"] > 0


def test_sessions_evict_each_other_and_free_memory(small_gpu, python, plain_environment, server):
    """Two programs alternate; each uses 40 of 64 MiB."""
    program = """
import sys, torch, djinn
values = [torch.full((20 << 18,), float(number)).to("remote_accelerator:0") for number in range(2)]
for line in sys.stdin:
    values = [value + 1 for value in values]
    print([value[-1].item() for value in values], flush=True)
"""
    known = {"DJINN_SERVERS": server.url("tcp"), "DJINN_TOKEN": server.token, "DJINN_THREADS": "1"}
    other = python.start_talking("-c", program, env={**plain_environment, **known})
    mine = [make_tensor(20, number) for number in range(2)]
    with other:
        for turn in range(1, 4):
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == f"{[turn + 0.0, turn + 1.0]}\n"
            mine = [value * 2 for value in mine]
            assert [value[-1].item() for value in mine] == [0, 2**turn]
        other.stdin.close()
        other.wait(SECONDS)
    assert executor_figures()["evictions"] > 0
    del mine
    djinn.synchronize()
    assert executor_figures()["memory_away"] == 0


def test_session_with_memory_failure_is_recovered(small_gpu):
    """When the op is repeated, there is enough memory, but the op fails again, as the client was told."""
    a = make_tensor(8, 1)
    too_large = a.repeat(10)
    with pytest.raises(torch.OutOfMemoryError):
        too_large.cpu()
    djinn.synchronize()
    small_gpu.configure(memory=16 << 30)
    small_gpu.inject("sticky", "aten::cos")
    with pytest.raises(djinn.errors.DjinnError, match="aten::cos"):
        a.cos().sum().item()
    assert a.sum().item() == 2 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        too_large.cpu()


def test_session_without_journal_names_failed_op(start_python, plain_environment, tmp_path):
    with (
        run_fake_server(start_python, plain_environment, tmp_path, "--lease-seconds", "0") as server,
        configured(servers=[server.url("tcp")], token=server.token, disable=("local",)),
    ):
        x = torch.ones(8).to(REMOTE)
        djinn.synchronize()
        RemoteControl(tmp_path).inject("sticky", "aten::cos")
        with pytest.raises(djinn.errors.SessionLost, match=r"the device is lost: an op at or before aten::\w+ \(op \d"):
            x.cos().sum().item()
        djinn.init()
        assert torch.ones(3).to(REMOTE).sum().item() == 3
