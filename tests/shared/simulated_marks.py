"""Marks of tests that cannot run where another platform is simulated: see `evaluation/simulated`."""

from __future__ import annotations

import os

import pytest

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks this process")
own_executors = pytest.mark.skipif(
    "SIMULATED_SERVER" in os.environ, reason="it is about executors of this process's own"
)
