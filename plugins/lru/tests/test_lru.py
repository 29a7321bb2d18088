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


def test_the_last_use_alone_counts():
    context = sample_evictions()["many"]
    uses = [context.candidates[position].last_use for position in LeastRecentlyUsed().order(context)]
    assert uses == sorted(uses, reverse=True)
    unhinted = tuple(attrs.evolve(one, next_use=None, residency="") for one in context.candidates)
    again = attrs.evolve(context, candidates=unhinted)
    assert LeastRecentlyUsed().order(again) == LeastRecentlyUsed().order(context)
