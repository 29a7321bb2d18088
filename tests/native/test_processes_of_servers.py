"""A process has one PrivateUse1 device: a client loads the library, and the processes of a server never do."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at the maps of processes")

PROGRAM = """
import pathlib, psutil, torch, djinn

assert torch.ones(2, device="remote_accelerator:0").sum().item() == 2
def loads(process):
    return "djinn_torch_" in pathlib.Path(f"/proc/{process.pid}/maps").read_text()
here = psutil.Process()
executors = [p for p in here.children(recursive=True) if "executor" in " ".join(p.cmdline())]
assert executors
print(loads(here), [loads(p) for p in executors])
"""


def test_only_client_loads_native_library(tmp_path, plain_environment):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=plain_environment | {"NATIVE_DEVICE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1) == ["True", "[False]\n"]
