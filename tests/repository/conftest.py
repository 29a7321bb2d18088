"""Fixtures of the tests of the repository itself: its files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Files that git tracks, or would if they were added; all of them where this is no git checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]


@pytest.fixture(scope="session")
def sources(files) -> list[Path]:
    return [path for path in files if path.suffix == ".py"]
