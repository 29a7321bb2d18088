from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def embedded_for_all():
    """`remote_accelerator` is the embedded default: an executor process of its own."""
    from configured import configured

    with configured(threads=1):
        yield


@pytest.fixture(scope="module")
def blind_pool(embedded_for_all):
    """`remote_accelerator` is two executors, and ops are placed on them in turn. For the last tests of a module."""
    from configured import configured

    with configured(threads=1, executors=2, placement_policy="round_robin"):
        yield
