from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def embedded_for_all():
    """Let `remote_accelerator` be the embedded default, an executor process of its own."""
    from configured import configured

    with configured(threads=1):
        yield


@pytest.fixture(scope="module")
def blind_pool(embedded_for_all):
    """Let `remote_accelerator` be two executors with ops placed alternately, for the last tests of a module."""
    from configured import configured

    with configured(threads=1, executors=2, placement_policy="round_robin"):
        yield
