"""Locks of the client: concurrent threads that begin, use and end sessions never deadlock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from long_forms import long_or
from safetensors.torch import save_file

SECONDS = long_or(1, 120)


@pytest.fixture
def weights_folder(tmp_path):
    """Return a folder from which the tests' server reads weights."""
    save_file({"weight": torch.tensor([1.0, 2.0, 3.0])}, tmp_path / "weights.safetensors")
    return tmp_path


def test_concurrent_init_use_and_shut_down_do_not_hang(python, served_environment, weights_folder):
    program = Path(__file__).with_name("session_stress.py")
    ended = python.run(program, SECONDS, weights_folder, env=served_environment, timeout=SECONDS + 120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_lock_order_has_no_cycle(python, served_environment, weights_folder):
    program = Path(__file__).with_name("session_stress.py")
    ended = python.run(program, long_or(1, 30), weights_folder, "order", env=served_environment, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
