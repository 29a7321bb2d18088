"""Tests that need neither Ray nor a cluster: resources, settings, and errors about missing parts."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

import djinn
import djinn_ray
from djinn.errors import StartupError
from djinn.hooks import LaunchRequest
from djinn.testing import PluginConformance
from djinn_ray import resources

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
(REQUIREMENT,) = PROJECT["optional-dependencies"]["ray"]


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_ray


def make_node(alive=True, **has):
    return {"Alive": alive, "NodeManagerAddress": f"10.0.0.{len(has)}", "Resources": has}


def test_sufficient_cluster_has_no_missing_resources():
    nodes = [make_node(CPU=4.0, GPU=2.0), make_node(CPU=4.0, GPU=1.0), make_node(alive=False, CPU=64.0, GPU=8.0)]
    assert resources.lacking(nodes, {"GPU": 1.0}, 3) == ""
    assert resources.lacking(nodes, {"GPU": 1.0}, 2, apart=True) == ""
    assert resources.lacking([make_node(GPU=0.3)], {"GPU": 0.1}, 3) == "", "a third part of a number is one"


def test_missing_resources_message_lists_cluster_resources():
    nodes = [
        make_node(CPU=4.0, GPU=2.0, memory=float(3 << 30), **{"node:10.0.0.1": 1.0}),
        make_node(alive=False, GPU=8.0),
    ]
    assert resources.lacking(nodes, {"GPU": 1.0, "CPU": 1.0}, 3) == (
        "the Ray cluster can never hold 3 executors with 1 CPU, 1 GPU each: even if it is idle, 2 fit. Its nodes have: 4 CPU, 2 GPU, "
        "3.0 GiB of memory"
    )
    assert "on separate nodes: even if it is idle, 1 fit" in resources.lacking(nodes, {"GPU": 1.0}, 2, apart=True)
    assert "an executor with 1 TPU: even if it is idle, 0 fit" in resources.lacking(nodes, {"TPU": 1.0}, 1)
    assert resources.lacking([], {"CPU": 1.0}, 1).endswith("Its nodes have: no node")


def test_actor_takes_bundle_resources():
    assert resources.actor_options({"GPU": 0.5, "slot": 1.0}) == {
        "num_cpus": 0,
        "num_gpus": 0.5,
        "resources": {"slot": 1.0},
    }
    assert resources.actor_options({"CPU": 2.0, "memory": 1e9})["memory"] == 1e9


def test_executor_threads_follow_cpu_resource():
    assert resources.threads_of({"CPU": 4.0}) == 4
    assert resources.threads_of({"CPU": 0.5}) == 1
    assert resources.threads_of({"GPU": 1.0}) == 0, "as many as PyTorch takes, and not the one that Ray sets"


def test_executor_listens_on_address_towards_head():
    worker, head = make_node(CPU=1.0), make_node(CPU=1.0, **{resources.HEAD: 1.0})
    assert resources.head_address([worker, head]) == head["NodeManagerAddress"]
    assert resources.head_address([worker]) == worker["NodeManagerAddress"]


def test_missing_ray_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    engine = djinn_ray.RayEngine(djinn_ray.Settings())
    with pytest.raises(StartupError, match=re.escape(f"pip install '{REQUIREMENT}'")):
        engine.launch(None, LaunchRequest())


def test_program_without_ray_names_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    djinn.shut_down()
    djinn.configure(plugins=["ray"], engine="ray")
    try:
        with pytest.raises(StartupError, match="needs the package ray"):
            djinn.init()
    finally:
        djinn.configure()


def test_invalid_ray_settings_are_refused():
    with pytest.raises(djinn.errors.ConfigurationError, match=r"plugins\.ray\.strategy.*SPREAD"):
        djinn.configure(plugins=["ray"], plugin_settings={"ray": {"strategy": "near"}})
