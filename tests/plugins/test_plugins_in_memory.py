"""Plugins that exist in the client's process alone: what works there works, and what executors would call is refused by name."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from configured import configured

import djinn
from djinn_client.runtime.connecting.own_executor import check_for_servers, names_for_executors
from djinn_core.errors import PluginError

Make = Callable[[str, str], ModuleType]
REMOTE = "remote_accelerator:0"
SERVED = ("local",)  # left out where this machine's server is to be reached as from another

AT_CLIENTS = """
import djinn
from djinn.planning import CostEstimate, OptimizationResult
from djinn.hooks import CostModel, Observer, Optimization, hookimpl
from djinn.planning import linear, matcher, op

djinn_api_version = "2.0"
events = []


class Watching(Observer):
    name = "in_memory"

    def observe(self, event):
        events.append(event.name)


class InMemory(Optimization):
    name = "in_memory"

    def optimize(self, context):
        events.append("optimized")
        return OptimizationResult(self.name, False, "there is nothing to do")


class Costs(CostModel):
    name, operations = "in_memory", frozenset({"add"})

    def estimate(self, graph, node, device):
        events.append("estimated")
        return None


@hookimpl
def djinn_register_observers():
    return [Watching()]


@hookimpl
def djinn_register_patterns():
    return [matcher("in_memory", op("relu")(linear()), confidence=0.9, reason="it is one")]


@hookimpl
def djinn_register_optimizations():
    return [InMemory()]


@hookimpl
def djinn_register_cost_models():
    return [Costs()]
"""

AT_EXECUTORS = """
from djinn.hooks import Compiler, hookimpl

djinn_api_version = "2.0"


class Latest(Compiler):
    name = "latest"

    def compile(self, context):
        return None


@hookimpl
def djinn_register_compilers():
    return [Latest()]
"""


def use_plugin(plugin: ModuleType) -> None:
    """Run a program that calls each object of the plugin."""
    linear = torch.nn.Linear(4, 4).to(REMOTE)
    with torch.no_grad():
        for _ in range(9):  # a tiny program is planned when it comes for the ninth time
            made = torch.relu(linear(torch.ones(2, 4, device=REMOTE))) + 1
            assert made.shape == (2, 4)
            assert bool((made >= 1).all().item())
    assert {"connected", "optimized", "estimated"} <= set(plugin.events)
    with djinn.capture() as captured, torch.no_grad():
        torch.relu(torch.nn.Linear(4, 4)(torch.ones(2, 4)))
    assert [match.pattern for match in captured.patterns] == ["in_memory"]


@pytest.fixture(params=["embedded", "server"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return settings for an own executor, and for a server."""
    if request.param == "embedded":
        return {"threads": 1}
    serving = request.getfixturevalue("serving")
    url = next(url for url in serving.urls if url.startswith("tcp"))
    return {"servers": [url], "token": serving.token, "disable": SERVED}


def test_client_plugin_object_stays_in_client(settings: dict[str, Any], module: Make) -> None:
    plugin = module("made_in_memory", AT_CLIENTS)
    with configured(plugins=["tcp", plugin], **settings):
        djinn.init()
        use_plugin(plugin)


def test_executor_plugin_object_is_refused(settings: dict[str, Any], module: Make) -> None:
    plugin = module("made_in_memory", AT_EXECUTORS)
    with configured(plugins=["tcp", plugin], **settings):
        with pytest.raises(
            PluginError,
            match=r"the plugin 'made_in_memory' (would do nothing|cannot be used): other processes cannot import this module",
        ) as caught:
            djinn.init()
        message = str(caught.value)
        assert "djinn_register_compilers" in message
        assert "on the import path" in message
        assert ("`djinn serve`" in message) is ("servers" in settings)


def test_inline_executor_accepts_plugin_object(module: Make) -> None:
    plugin = module("made_in_memory", AT_CLIENTS + AT_EXECUTORS)
    with configured(plugins=["compiled", plugin], executor="inline", compilers="latest", threads=1):
        djinn.init()
        use_plugin(plugin)


def test_client_part_of_mixed_plugin_object_works(serving: Any, module: Make, caplog: pytest.LogCaptureFixture) -> None:
    plugin = module("made_in_memory", AT_CLIENTS + AT_EXECUTORS)
    url = next(url for url in serving.urls if url.startswith("tcp"))
    with configured(plugins=["tcp", plugin], servers=[url], token=serving.token, disable=SERVED):
        djinn.init()
        use_plugin(plugin)
    (warned,) = [record.djinn for record in caplog.records if "for servers" in record.getMessage()]
    assert warned["hooks"] == ["djinn_register_compilers"]
    assert warned["plugin"] == "'made_in_memory'"


def test_module_from_file_is_loaded_by_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policies_in_a_file.py").write_text(AT_EXECUTORS)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = importlib.import_module("policies_in_a_file")
    with configured(plugins=["compiled", plugin], compilers="latest", threads=1):
        djinn.init()
        assert torch.ones(3, device=REMOTE).sum().item() == 3


@pytest.fixture
def module_by_path(tmp_path: Path) -> Iterator[ModuleType]:
    """Return a module whose file cannot be imported by name."""
    file = tmp_path / "by_path.py"
    file.write_text("djinn_api_version = '2.0'")
    spec = importlib.util.spec_from_file_location("by_path", file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    sys.modules["by_path"] = found
    yield found
    del sys.modules["by_path"]


def test_importable_module_may_be_named(module_by_path: ModuleType) -> None:
    main, impostor, nested = sys.modules["__main__"], ModuleType("json"), importlib.import_module("json.decoder")
    assert names_for_executors(("tcp", pytest, json, nested)) == ("tcp", "pytest", "json", "json.decoder")
    assert names_for_executors((main, object(), impostor, module_by_path, ModuleType("json.none"), "tcp")) == ("tcp",)
    assert names_for_executors(None) is None
    check_for_servers(None)


def test_device_plugin_object_is_refused() -> None:
    class Plugin:
        name = "mine"

        def djinn_register_devices(self) -> list[object]:
            return []

    with pytest.raises(PluginError, match=r"'mine'.*cannot import an object.*djinn_register_devices"):
        names_for_executors((Plugin(),))
    with pytest.raises(PluginError, match=r"'mine'.*cannot import an object.*djinn_register_devices.*`djinn serve`"):
        check_for_servers((Plugin(),))
