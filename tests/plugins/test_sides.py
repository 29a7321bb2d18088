"""Plugins load where only the package of their side is installed: executors and gateways without djinn_client, clients without djinn_server."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from configured import configured
from servers import fresh_python, start_server

import djinn
from djinn_core.registry.kinds import CLIENT_KINDS, EXECUTOR_KINDS, GATEWAY_KINDS, KINDS

pytestmark = pytest.mark.usefixtures("fresh_processes")

# `sitecustomize.py` of a process, and of those that it starts: packages that are not installed.
MISSING = """
import importlib.util, sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in MISSING else found(name, package)
sys.meta_path.insert(0, Missing())
"""
LOADING = """
import json, sys
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection

registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=set(sys.argv[1:]))
registry.load(*sys.argv[1:])
print(json.dumps({row.name: [row.status, row.error] for row in registry.rows}))
"""
LACKING = {
    "client": {"djinn_server"},
    "executor": {"djinn_client", "djinn_native"},
    "gateway": {"djinn_client", "djinn_native"},
}


@pytest.fixture
def environment_without(tmp_path, plain_environment):
    """Return a function that returns the environment of a process in which packages are missing."""

    def environment(missing):
        (tmp_path / "sitecustomize.py").write_text(f"MISSING = {missing}\n{MISSING}")
        return plain_environment | {"PYTHONPATH": str(tmp_path)}

    return environment


@pytest.mark.parametrize(
    ("side", "kinds"), [("client", CLIENT_KINDS), ("executor", EXECUTOR_KINDS), ("gateway", GATEWAY_KINDS)]
)
def test_plugins_load_without_package_of_other_side(environment_without, side, kinds):
    there = {kind.name for kind in KINDS if kind.name in kinds and kind.package not in LACKING[side]}
    command = [sys.executable, "-c", LOADING, *sorted(there)]
    done = subprocess.run(
        command, env=environment_without(LACKING[side]), capture_output=True, text=True, timeout=100, check=False
    )
    assert not done.returncode, done.stderr
    rows = json.loads(done.stdout)
    points = [point for kind in there for point in entry_points(group=f"djinn.{kind}")]
    brings = {
        point.name for point in points if any(one.startswith("djinn-server") for one in point.dist.requires or ())
    }
    installed = {point.name for point in points} - (brings if side == "client" else set())
    assert installed <= rows.keys()
    assert {name: row for name, row in rows.items() if name in installed and row[0] != "active"} == {}


def test_server_without_djinn_client_runs_layouts(environment_without, tmp_path):
    server = start_server(
        fresh_python, tmp_path, "--threads", "1", env=environment_without({"djinn_client", "djinn_native"})
    )
    try:
        with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
            djinn.init()
            sparse = torch.eye(3, device="remote_accelerator:0").to_sparse()
            assert (sparse @ torch.ones(3, 1, device=sparse.device)).tolist() == [[1.0]] * 3
    finally:
        server.stop()
