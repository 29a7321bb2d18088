"""The Makefile's question if Python has a PyTorch that Djinn can use; the PyTorch is a fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "packaging" / "torch_here.py"


@pytest.fixture
def run_torch_here(tmp_path):
    """Return a function that runs the script beside a fake PyTorch. It returns the output and the .pth file."""

    def run_torch_here(version, source=""):
        beside = tmp_path / "a folder"
        for file, text in (
            (f"torch-{version}.dist-info/METADATA", f"Name: torch\nVersion: {version}\n"),
            ("torch.py", source),
            ("beside.py", ""),
        ):
            (beside / file).parent.mkdir(parents=True, exist_ok=True)
            (beside / file).write_text(text)
        own = tmp_path / "environment" / "lib" / "python3.11" / "site-packages"
        own.mkdir(parents=True)
        environment = os.environ | {"PYTHONPATH": str(beside)}
        command = [sys.executable, SCRIPT, tmp_path / "environment"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip(), own / "torch_here.pth"

    return run_torch_here


@pytest.mark.parametrize("version", ["2.13.1+cu130", "2.14.1"])
def test_environment_uses_compatible_torch(run_torch_here, version):
    said, file = run_torch_here(version)
    assert said == version
    seen = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import site; site.addsitedir({str(file.parent)!r}); import beside; print(beside.__file__)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a folder" in seen.stdout


@pytest.mark.parametrize(
    ("version", "source"), [("2.12.1", ""), ("2.15.0", ""), ("2.13.0", "raise ImportError('no driver')")]
)
def test_incompatible_torch_is_not_used(run_torch_here, version, source):
    said, file = run_torch_here(version, source)
    assert not said
    assert not file.exists()
