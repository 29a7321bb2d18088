"""Locks of the client: threads that begin, use and end sessions at the same time wait for each other, and never in a circle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from long_forms import long_or
from safetensors.torch import save_file

SECONDS = long_or(3, 120)


@pytest.fixture
def weights_folder(tmp_path):
    """A folder that the tests' server reads weights from."""
    save_file({"weight": torch.tensor([1.0, 2.0, 3.0])}, tmp_path / "weights.safetensors")
    return tmp_path


def test_threads_begin_use_and_end_sessions_without_a_hang(python, served_environment, weights_folder):
    program = Path(__file__).with_name("session_stress.py")
    ended = python.run(program, SECONDS, weights_folder, env=served_environment, timeout=SECONDS + 120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_locks_are_taken_in_one_order(python, served_environment, weights_folder):
    program = Path(__file__).with_name("session_stress.py")
    ended = python.run(program, long_or(2, 30), weights_folder, "order", env=served_environment, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
