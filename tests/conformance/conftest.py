from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

# `op_database` is a script, too (`make conformance`), so it lies beside its test instead of in a package.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def embedded_for_all():
    """`remote_accelerator` is the embedded default: an executor process of its own."""
    with _configured(threads=1):
        yield


@pytest.fixture(scope="module")
def blind_pool(embedded_for_all):
    """`remote_accelerator` is two executors, and ops are placed on them in turn. For the last tests of a module."""
    with _configured(threads=1, executors=2, placement_policy="round_robin"):
        yield


@contextlib.contextmanager
def _configured(**settings):
    import torch

    import djinn

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DJINN_")]:
            patch.delenv(name)
        patch.setenv("DJINN_CONFIG", os.devnull)
        djinn.configure(**settings)
        yield
        djinn.configure()
    torch.set_num_threads(threads)
