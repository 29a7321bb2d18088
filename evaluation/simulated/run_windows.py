"""Run tests in a process that simulates Windows, with a TLS server on Linux instead of local executors.

Tests that fork are left out. `argv`: `tcps` or `https`, then arguments of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from evaluation.served import served

HERE = Path(__file__).parent
# Libraries that tests import: later imports find less than on Windows.
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
