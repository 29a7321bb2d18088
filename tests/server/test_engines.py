"""Engines: processes on this machine, and executors that an engine holds elsewhere, for clients and for gateways."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from held_engine import HeldEngine, HeldHandle, HeldPlugin
from servers import wait_for

import djinn
from djinn.errors import PluginError, StartupError
from djinn.hooks import ExecutorHolder, LaunchRequest
from djinn.testing import ExecutorConformance, open_connections, run_executor_states
from djinn_pool import drained_nodes
from djinn_server.gateway.pool import Pool
from djinn_server.launch.engines import LocalEngine, start_executor
from djinn_server.launch.executor_config import ExecutorConfig


class TestLocalEngine(ExecutorConformance):
    @pytest.fixture
    def engine(self):
        return LocalEngine()


@pytest.mark.parametrize("engine", [LocalEngine(), HeldEngine()], ids=["local", "held"])
def test_local_engine_matches_state_model(engine):
    run_executor_states(engine, examples=2)


@pytest.fixture
def held_engine():
    """Connect to executors that the engine `held` holds. Yield the engine with its received requests."""
    djinn.shut_down()
    engine = HeldEngine()
    djinn.configure(plugins=["tcp", "pool", "round_robin", HeldPlugin(engine)], engine="held", threads=1)
    yield engine
    djinn.shut_down()
    djinn.configure()


def losses(device, between=lambda: None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        if step == 1:
            between()
    return found


def test_single_engine_executor_needs_no_router(held_engine):
    djinn.configure(plugins=["tcp", HeldPlugin(held_engine)], engine="held", threads=1)
    assert losses("remote_accelerator:0") == losses("cpu")


def test_engine_pool_survives_killed_executors(held_engine):
    djinn.configure(executors=2, placement_policy="round_robin", resources="GPU=1", runtime_env={"pip": ["x"]})
    here = losses("cpu")

    def kill():
        for opened in open_connections():
            os.kill(opened.executor.process_id, signal.SIGKILL)

    assert losses("remote_accelerator:0", kill) == here
    assert [
        (request.number, request.count, request.resources, request.runtime_env) for request in held_engine.requests
    ] == [(number, 2, {"GPU": 1.0}, {"pip": ["x"]}) for number in range(2)]
    assert len({request.group for request in held_engine.requests}) == 1
    assert {opened.url.partition("://")[0] for opened in open_connections()} == {"tcps"}


def test_session_survives_killed_holder(held_engine):
    """A killed holder ends its executor silently. The next executor finds the journal."""
    djinn.init()
    (opened,) = open_connections()
    kept = torch.ones(3, device="remote_accelerator:0") + 1
    assert kept.sum().item() == 6
    process = opened.executor.process_id
    opened.executor._process._handle.holder._process._process.stdin.close()  # as the system does when a holder is killed
    assert opened.executor._process.wait() == 1
    assert (kept + 1).sum().item() == 9
    assert opened.executor.process_id != process


def test_failed_start_keeps_journal(held_engine, monkeypatch):
    djinn.init()
    (opened,) = open_connections()
    kept = torch.ones(3, device="remote_accelerator:0") + 1
    assert kept.sum().item() == 6
    ready, failed = ExecutorHolder.wait_ready, []

    def fail_once(holder, timeout):
        if failed:
            return ready(holder, timeout)
        failed.append(holder)
        raise StartupError("not now")

    monkeypatch.setattr(ExecutorHolder, "wait_ready", fail_once)
    os.kill(opened.executor.process_id, signal.SIGKILL)
    assert (kept + 1).sum().item() == 9
    assert failed


def test_unknown_engine_is_named(held_engine):
    djinn.configure(engine="kubernetes")
    with pytest.raises(djinn.errors.PluginError, match=r"no engine 'kubernetes'.*installed: held, local"):
        djinn.init()


def test_raising_notice_warns_once(held_engine, monkeypatch, caplog):
    asked = {0: 0, 1: 0}

    def notice(handle):
        number = int(handle.arguments[1].rpartition("-")[2])
        asked[number] += 1
        if number == 0:
            raise KeyError("a node that the engine does not know")
        return ""

    monkeypatch.setattr(HeldHandle, "notice", notice)
    monkeypatch.setattr(drained_nodes, "LOOK_SECONDS", 0.05)
    djinn.configure(executors=2, placement_policy="round_robin")
    kept = torch.ones(3, device="remote_accelerator:0") + 1
    assert kept.sum().item() == 6
    wait_for(lambda: asked[1] > 5, "some looks at the executor whose handle answers")
    assert asked[0] == 1
    (warning,) = [record for record in caplog.records if "failed to report drained nodes" in record.getMessage()]
    said = warning.getMessage() + str(vars(warning))
    assert "HeldPlugin" in said
    assert "KeyError: 'a node that the engine does not know'" in said
    assert "test_engines.py:" in said
    assert (kept + 1).sum().item() == 9
    assert len(open_connections()) == 2


class InvalidHandle:
    """An invalid result of an engine whose executor runs."""


WRONG = r"plugin of held_engine started no executor: held_engine\.Held{} returned an instance of InvalidHandle.*djinn\.hooks\.ExecutorHandle.*`engine`"


def test_engine_without_handle_is_named(held_engine, monkeypatch):
    monkeypatch.setattr(HeldEngine, "launch", lambda engine, options, request: InvalidHandle())
    with pytest.raises(PluginError, match=WRONG.format(r"Engine\.launch")):
        djinn.init()


def test_class_instead_of_handle_is_named(monkeypatch):
    monkeypatch.setattr(HeldEngine, "launch", lambda engine, options, request: HeldHandle)
    with pytest.raises(PluginError, match="returned the class HeldHandle, but must return an instance"):
        start_executor(HeldEngine(), ExecutorConfig("cpu"), LaunchRequest())


def test_invalid_restarted_handle_is_named(monkeypatch):
    executor = start_executor(HeldEngine(), ExecutorConfig("cpu", threads=1), LaunchRequest(group="wrong"))
    handle = executor._handle
    try:
        executor.wait_ready(60.0)
        with monkeypatch.context() as patch:
            patch.setattr(HeldHandle, "restart", lambda handle: InvalidHandle())
            with pytest.raises(PluginError, match=WRONG.format(r"Handle\.restart")):
                executor.restart()
    finally:
        executor.close(0.0)
    wait_for(lambda: handle.ended, "a thread to note the end of the holder")


def test_invalid_handle_ends_started_pool_executors(monkeypatch):
    launch, right = HeldEngine.launch, []

    def launch_one(engine, options, request):
        if right:
            return InvalidHandle()
        right.append(launch(engine, options, request))
        return right[0]

    monkeypatch.setattr(HeldEngine, "launch", launch_one)
    configs = [ExecutorConfig("cpu", threads=1)] * 2
    requests = [LaunchRequest(number, 2, "wrong") for number in range(2)]
    with pytest.raises(PluginError, match=WRONG.format(r"Engine\.launch")):
        Pool(configs, 60.0, engine=HeldEngine(), requests=requests)
    wait_for(lambda: right[0].ended, "a thread to note the end of the holder")


def test_pool_survives_invalid_restarted_handle(monkeypatch):
    restart, wrong = HeldHandle.restart, []

    def restart_second_time(handle):
        if not wrong:
            wrong.append(InvalidHandle())
            return wrong[0]
        return restart(handle)

    monkeypatch.setattr(HeldHandle, "restart", restart_second_time)
    pool = Pool([ExecutorConfig("cpu", threads=1)], 60.0, engine=HeldEngine(), requests=[LaunchRequest(group="wrong")])
    try:
        (first,) = pool.wait_ready()
        os.kill(first.process_id, signal.SIGKILL)
        (supervised,) = pool.executors
        wait_for(lambda: supervised.restarts == 1, "another executor")
        assert wrong
        assert supervised.launched.alive
    finally:
        pool.close(0.0)
