"""Every example runs, warnings being errors, and says what it found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
DJINN_RUN = ["-m", "djinn_core.cli", "run", "--stats"]  # for scripts that know of CUDA only
# transformers touches a deprecated alias in torch while it is imported.
WARNINGS = ["-W", "error", "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DJINN_")}
    environ |= {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    cuda = path.stem.startswith("cuda_")
    command = [sys.executable, *WARNINGS, *(DJINN_RUN if cuda else []), str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("round_trips" in done.stderr and "cuda:0" in done.stdout) if cuda else "round trips" in done.stdout
