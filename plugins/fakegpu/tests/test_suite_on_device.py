"""Short form of `python -m evaluation fakegpu-suite`: tests of executors, with servers that compute on the fake GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
ROOT = Path(__file__).parents[3]
# Without tests that import transformers, and those of workers and optimizers, which take seconds.
SHORT = ("tests/models/test_everyday.py", "-k", "not save_remote_model and not workers and not optimizers_equal")


def test_executor_tests_pass_on_device(python, plain_environment):
    # A fork has modules of plugins of pytest imported already.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    environment = plain_environment | {"SERVED_DEVICE": "fakegpu"}
    done = python.run("-m", "pytest", *options, *SHORT, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20, done.stdout
