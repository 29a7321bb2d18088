from __future__ import annotations

import attrs
import pytest

import djinn_lru
from djinn.testing import MemoryPolicyConformance, PluginConformance, sample_evictions
from djinn_lru import LeastRecentlyUsed


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_lru


class TestPolicy(MemoryPolicyConformance):
    @pytest.fixture
    def policy(self):
        return LeastRecentlyUsed()


def test_lru_orders_by_the_last_use_alone():
    candidates = sample_evictions()
    unhinted = [attrs.evolve(one, next_use=None, nbytes=1) for one in candidates]
    for found in (candidates, unhinted):
        assert [LeastRecentlyUsed().key(one) for one in found] == [one.last_use for one in candidates]
