"""Every example runs, warnings being errors, and says what it found."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
DJINN_RUN = ["-m", "djinn_core.cli", "run", "--stats"]  # for scripts that know of CUDA only
# transformers touches a deprecated alias in torch while it is imported.
WARNINGS = ["-W", "error", "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, python, plain_environment, tmp_path):
    cuda = path.stem.startswith("cuda_")
    done = python.run(*WARNINGS, *(DJINN_RUN if cuda else []), path, cwd=tmp_path, env=plain_environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("round_trips" in done.stderr and "cuda:0" in done.stdout) if cuda else "round trips" in done.stdout
