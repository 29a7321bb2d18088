"""Runs tests in a process that is like Windows, with a server under TLS on Linux in the place of executors of its own.

Tests that start processes by forking are left out. `argv`: `tcps` or `https`, then what pytest is given.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from evaluation.served import served

HERE = Path(__file__).parent
# Of libraries that tests import: what is imported later finds less than on Windows.
LIBRARIES = "torch.distributed.checkpoint transformers.models.gpt2.modeling_gpt2 pytest_timeout anyio _pytest.tmpdir"


def main() -> int:
    transport, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="djinn-windows-") as folder:
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": folder, "XDG_CACHE_HOME": folder}
        with served("--tls-self-signed", folder=Path(folder), environment=own) as server:
            own |= {"SIMULATED_PLATFORM": "win32", "PYTHONPATH": str(HERE), "SIMULATED_LIBRARIES": LIBRARIES}
            own |= {
                "SIMULATED_SERVER": str(server.file),
                "SIMULATED_DISABLE": "tcp" if transport == "https" else "http",
            }
            quiet = ["-o", "timeout_method=thread", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            tests = [sys.executable, "-m", "pytest", *quiet, *arguments]
            return subprocess.run(tests, env=os.environ | own, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
