"""For every test, of the core and of plugins: nothing that the person has configured, and sums in one order."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

for _name in [name for name in os.environ if name.startswith("DJINN_")]:
    del os.environ[_name]
os.environ["DJINN_CONFIG"] = os.devnull
# As many threads here as the executors of the tests have: sums are then taken in the same order.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that the tests start keep weights here, and not with those of the person."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
