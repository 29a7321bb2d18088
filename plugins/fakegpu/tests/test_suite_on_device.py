"""Short form of `python -m evaluation fakegpu-suite`: tests of executors, with servers that compute on the fake GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
ROOT = Path(__file__).parents[3]
SHORT = (
    "tests/e2e/test_fusion.py",
    "tests/models/test_everyday.py",
    "-k",
    "not save_remote_model",
)  # the test imports transformers


def test_tests_of_executors_pass_on_the_device(plain_environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SHORT]
    environment = plain_environment | {"SERVED_DEVICE": "fakegpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 25, done.stdout
