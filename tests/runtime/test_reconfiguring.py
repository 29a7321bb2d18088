"""`djinn.configure()` in the middle of a program: what the open session takes over, and what it refuses."""

from __future__ import annotations

import gc

import pytest
import torch
from configured import configured

import djinn
from djinn.hooks import Observer, Optimization
from djinn_client.runtime import client
from djinn_client.runtime.reconfiguring import changed, needing_new_session
from djinn_core.settings import Settings


@pytest.fixture
def own_executor_device():
    """Yield the device on a new executor of this test."""
    with configured(threads=1):
        yield "remote_accelerator:0"


def test_session_with_tensors_is_not_ended(own_executor_device):
    held = torch.arange(3.0, device=own_executor_device) + 1
    name = djinn.init() or client.session_name()
    gc.freeze()  # which hides objects from those who look for them, and takes no tensor away
    with pytest.raises(
        djinn.errors.ConfigurationError, match=r"threads cannot change .* holds \d+ tensors?.*shut_down"
    ):
        djinn.configure(threads=2)
    assert client.session_name() == name
    assert client.settings().threads == 1
    assert held.tolist() == [1, 2, 3]
    djinn.configure(progress=False)  # what was refused is not remembered
    assert held.tolist() == [1, 2, 3]


def test_live_settings_apply_at_once(own_executor_device):
    held = torch.arange(3.0, device=own_executor_device) + 1
    djinn.init()
    name = client.session_name()
    djinn.configure(wait_timeout=0.000001)
    with pytest.raises(djinn.errors.DeadlineExceeded):
        torch.rand(600, 600, device=own_executor_device).mm(torch.rand(600, 600, device=own_executor_device)).tolist()
    djinn.configure(wait_timeout=0, checkpoint_instructions=64)
    assert client.settings().checkpoint_instructions == 64
    assert client.session_name() == name
    assert held.tolist() == [1, 2, 3]


def test_reconfiguring_keeps_earlier_settings(own_executor_device):
    djinn.configure(progress=False)
    djinn.configure(connect_timeout=7)
    assert (client.settings().progress, client.settings().connect_timeout, client.settings().threads) == (False, 7, 1)
    djinn.configure()
    assert (client.settings().progress, client.settings().threads) == (True, None)


def test_empty_session_ends_with_warning(own_executor_device, caplog):
    djinn.init()
    name = client.session_name()
    (torch.ones(2, device=own_executor_device) + 1).tolist()  # no longer referenced
    djinn.configure(threads=2)
    assert "has ended the session" in caplog.text
    assert not djinn.compat.is_initialized()
    assert (torch.ones(2, device=own_executor_device) + 1).tolist() == [2, 2]
    assert client.session_name() != name


def test_values_of_former_session_do_not_count(own_executor_device):
    lost = torch.ones(2, device=own_executor_device)
    djinn.synchronize()
    djinn.shut_down()
    djinn.init()
    djinn.configure(threads=2)
    assert not djinn.compat.is_initialized()
    with pytest.raises(djinn.errors.SessionLost):
        lost.tolist()


class RoundingOptimization(Optimization):
    """An optimization that rounds differently and counts its calls."""

    name = "remembering"
    exact = False

    def __init__(self):
        self.asked = 0

    def optimize(self, context):
        from djinn.planning import OptimizationResult

        self.asked += 1
        return OptimizationResult(self.name, applied=False, reason="it only counts")


class Plugin:
    """A plugin that registers one optimization object."""

    name = "remembering_plugin"
    djinn_api_version = "2.0"

    def __init__(self):
        self.optimization = RoundingOptimization()

    @djinn.hooks.hookimpl
    def djinn_register_optimizations(self):
        return [self.optimization]


@pytest.mark.usefixtures("plans_all")
def test_changed_plugins_and_settings_replan(own_executor_device):
    held = torch.ones(3, device=own_executor_device)
    (held * 2).tolist()
    plugin = Plugin()
    session = client.session_name()
    djinn.configure(plugins=[plugin], disable=("local",))
    (held * 2).tolist()
    assert plugin.optimization.asked == 0
    djinn.configure(exact=False)
    (held * 2).tolist()
    assert plugin.optimization.asked > 0
    assert client.session_name() == session


def test_changed_plugins_replan_in_pool(own_executor_device):
    djinn.shut_down()
    djinn.configure(executors=2)
    held = torch.ones(3, device=own_executor_device)
    for _ in range(4):
        (held * 2).tolist()
    before = djinn.stats()["plans_made"]
    (held * 2).tolist()
    assert djinn.stats()["plans_made"] == before
    djinn.configure(placement_policy="round_robin")
    assert (held * 2).tolist() == [2, 2, 2]
    assert djinn.stats()["plans_made"] > before


def test_observers_of_open_session_are_replaced(own_executor_device):
    seen = []

    class WatchingObserver(Observer):
        name = "watching"

        def observe(self, event):
            seen.append(event.name)

    class ObserverPlugin:
        name = "watching_plugin"
        djinn_api_version = "2.0"

        @djinn.hooks.hookimpl
        def djinn_register_observers(self):
            return [WatchingObserver()]

    held = torch.ones(3, device=own_executor_device)
    held.tolist()
    djinn.configure(plugins=[ObserverPlugin()], disable=("local",))
    (held + 3).tolist()
    assert "submitted" in seen


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        (Settings(), Settings(threads=2), {"threads"}),
        (Settings(servers="tcp://a:1"), Settings(servers="tcp://a:1", threads=2), set()),
        (Settings(servers="tcp://a:1"), Settings(servers="tcp://b:1"), {"servers"}),
        (Settings(), Settings(token="t" * 16), set()),
        (Settings(servers="tcp://a:1"), Settings(servers="tcp://a:1", token="t" * 16), {"token"}),
        (Settings(), Settings(exact=False, scheduler="priority", pins="a=1", progress=False), set()),
        (Settings(), Settings(memory_limits="1 GiB"), {"memory_limits"}),
        (Settings(), Settings(compilers="inductor"), {"compilers"}),
        (Settings(servers="tcp://a:1"), Settings(servers="tcp://a:1", compilers="inductor"), set()),
    ],
)
def test_settings_that_need_new_session(before, after, again):
    assert needing_new_session(changed(before, after), before) == again


def test_compilers_need_new_session():
    names = frozenset({"plugins"})
    assert needing_new_session(names, Settings(compilers="inductor")) == set()
    assert needing_new_session(names, Settings(servers="tcp://a:1"), executor_plugins_differ=True) == set()
    assert needing_new_session(names, Settings(compilers="inductor"), executor_plugins_differ=True) == names
