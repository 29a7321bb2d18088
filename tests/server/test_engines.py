"""Engines: processes on this machine, and executors that an engine holds elsewhere, for clients and for gateways."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from held_engine import HeldEngine, HeldPlugin

import djinn
from djinn.errors import StartupError
from djinn.hooks import ExecutorHolder
from djinn.testing import ExecutorConformance, open_connections, run_executor_states
from djinn_server.launch.engines import LocalEngine


class TestLocalEngine(ExecutorConformance):
    @pytest.fixture
    def engine(self):
        return LocalEngine()


@pytest.mark.parametrize(("engine", "examples"), [(LocalEngine(), 2), (HeldEngine(), 4)], ids=["local", "held"])
def test_executor_agrees_with_a_model_of_its_states(engine, examples):
    run_executor_states(engine, examples=examples)


@pytest.fixture
def held():
    """Settings for executors that an engine holds, and the requests that it has heard."""
    djinn.shut_down()
    engine = HeldEngine()
    djinn.configure(plugins=["tcp", "round_robin", HeldPlugin(engine)], engine="held", threads=1)
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


def test_a_pool_that_an_engine_holds_trains_and_outlives_its_executors(held):
    djinn.configure(executors=2, placement_policy="round_robin", resources="GPU=1", runtime_env={"pip": ["x"]})
    here = losses("cpu")

    def kill():
        for opened in open_connections():
            os.kill(opened.executor.process_id, signal.SIGKILL)

    assert losses("remote_accelerator:0", kill) == here
    assert [(request.number, request.count, request.resources, request.runtime_env) for request in held.requests] == [
        (number, 2, {"GPU": 1.0}, {"pip": ["x"]}) for number in range(2)
    ]
    assert len({request.group for request in held.requests}) == 1
    assert {opened.url.partition("://")[0] for opened in open_connections()} == {"tcps"}


def test_executors_outlive_their_holders(held):
    """A holder that is killed ends its executor without a word; the next one finds the journal."""
    djinn.init()
    (opened,) = open_connections()
    kept = torch.ones(3, device="remote_accelerator:0") + 1
    assert kept.sum().item() == 6
    process = opened.executor.process_id
    opened.executor._process._handle.holder._process._process.stdin.close()  # as the system does when a holder is killed
    assert opened.executor._process.wait() == 1
    assert (kept + 1).sum().item() == 9
    assert opened.executor.process_id != process


def test_a_start_that_fails_leaves_the_journal_to_the_next(held, monkeypatch):
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


def test_an_engine_that_there_is_not(held):
    djinn.configure(engine="kubernetes")
    with pytest.raises(djinn.errors.PluginError, match=r"no engine 'kubernetes'.*installed: held, local"):
        djinn.init()
