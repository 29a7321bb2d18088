"""Plugins wrap the channels of sessions: one of a stranger's, alone and around failover, and what is said where none fits."""

from __future__ import annotations

import ast
import os
import signal
from pathlib import Path

import pytest
import slow_channel
import torch
from configured import configured
from slow_channel import Plugin, SlowNetwork

import djinn
from djinn.hooks import ChannelWrapper, hookimpl
from djinn.testing import ChannelConformance, break_connection, executor_processes
from djinn_client.runtime import client
from djinn_core.errors import PluginError

REMOTE = "remote_accelerator:0"


class TestSlowNetwork(ChannelConformance):
    @pytest.fixture
    def wrapper(self):
        return SlowNetwork()


def losses(at_step_4=lambda: None):
    """Return the losses of a few steps."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    model, given, found = model.to(REMOTE), torch.randn(4, 8).to(REMOTE), []
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        if step == 4:
            at_step_4()
        optimizer.zero_grad()
        loss = model(given).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def expected():
    with configured(threads=1):
        return losses()


@pytest.fixture
def network():
    return SlowNetwork()


@pytest.fixture
def count_messages():
    """Return a function that counts the client's sent and received messages since the start of the test."""

    def count():
        stats = djinn.stats()
        return [stats["messages_sent"] - before[0], stats["messages_received"] - before[1]]

    before = [0, 0]
    before = count()
    return count


def test_wrapper_plugin_imports_djinn_only():
    source = Path(slow_channel.__file__).read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert {module for module in modules if module.startswith("djinn")} == {"djinn.hooks"}


@pytest.mark.parametrize("executor", ["process", "inline"])
def test_wrapper_sees_all_frames(expected, network, count_messages, executor):
    with configured(threads=1, executor=executor, plugins=[Plugin(network)]):
        assert losses() == expected
        (channel,) = network.wrapped
        assert channel.frames == count_messages()
        assert channel.nbytes[1] > 0
        assert not channel.logged
        djinn.shut_down()
        assert channel.ended == ["expire", "close"]
    (context,) = network.contexts
    assert (context.attached.device.kind, context.standby) == ("cpu", ())


def test_wrapper_sees_frames_once_after_break(expected, network, count_messages):
    with configured(threads=1, plugins=[Plugin(network)]):
        assert losses(break_connection) == expected
        (channel,) = network.wrapped
        assert channel.frames[0] == count_messages()[0]


def test_pool_wraps_each_executor(network):
    with configured(threads=1, executors=2, plugins=[Plugin(network), "pool"]):
        there = [torch.arange(4.0, device=f"remote_accelerator:{number}").sum().item() for number in range(2)]
        assert there == [6.0, 6.0]
        assert [min(channel.frames) > 0 for channel in network.wrapped] == [True, True]


def test_wrapper_is_outside_failover(expected, network, count_messages):
    plugins = [Plugin(network), "standby"]
    with configured(threads=1, recover=False, standby=["engine"], plugins=plugins):
        assert losses(lambda: os.kill(executor_processes()[0], signal.SIGKILL)) == expected
        (channel,), (context,) = network.wrapped, network.contexts
        assert context.standby == ()
        assert channel.logged
        assert channel.successor is not None
        assert channel.frames[0] == count_messages()[0], "what is sent again does not pass it again"


def test_standby_without_failover_wrapper_is_refused(network):
    message = r"`standby` needs a plugin.*`pip install \./plugins/standby`"
    for plugins in ([], [Plugin(network)]):
        with configured(standby=["engine"], plugins=plugins), pytest.raises(PluginError, match=message):
            djinn.init()
    assert not network.wrapped


class WrapperWithoutChannel(ChannelWrapper):
    name = "slow"

    def wrap(self, channel, context):
        raise ValueError("no cable")


class WrapperReturningNone(ChannelWrapper):
    name = "slow"

    def wrap(self, channel, context):
        """Forgets to return it."""


def test_wrapper_without_channel_is_named():
    with configured(plugins=[Plugin(WrapperReturningNone())]):
        with pytest.raises(PluginError, match=r"slow.*returned a NoneType, not a channel"):
            djinn.init()
        assert not client.is_initialized()


def test_raising_wrapper_is_named():
    with configured(plugins=[Plugin(WrapperWithoutChannel())]):
        with pytest.raises(PluginError, match=r"slow.*wrapping the channel.*raised ValueError: no cable"):
            djinn.init()
        assert not client.is_initialized()
    with configured():
        assert torch.ones(2, device=REMOTE).sum().item() == 2.0


class BreakingSecondChannel(SlowNetwork):
    def wrap(self, channel, context):
        if self.wrapped:
            raise ValueError("no second cable")
        return super().wrap(channel, context)


class RaisingWrapper(ChannelWrapper):
    name = "tight"  # after "slow"

    def wrap(self, channel, context):
        raise ValueError("nothing fits around it")


class TwoWrappers(Plugin):
    @hookimpl
    def djinn_register_channels(self):
        return [self.network, RaisingWrapper()]


@pytest.mark.parametrize(
    ("executors", "plugin"),
    [(2, Plugin(BreakingSecondChannel())), (1, TwoWrappers(SlowNetwork()))],
    ids=["another", "outer"],
)
def test_channels_close_when_other_wrapper_raises(executors, plugin):
    settings = {"threads": 1, "executors": executors, "plugins": [plugin, "pool"]}
    with configured(**settings), pytest.raises(PluginError, match="raised ValueError"):
        djinn.init()
    (channel,) = plugin.network.wrapped
    assert channel.ended == ["close"]
