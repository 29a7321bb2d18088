from __future__ import annotations

import attrs
import pytest
import torch

import djinn_result_cache
from djinn.hooks import RunResults
from djinn.testing import PluginConformance, RunStrategyConformance
from djinn_result_cache import ResultCache, Settings, strategy
from djinn_result_cache.strategy import Cache


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self, monkeypatch):
        monkeypatch.setattr(djinn_result_cache, "djinn_settings", EnabledSettings)
        return djinn_result_cache


@attrs.frozen
class EnabledSettings(Settings):
    gib: float = 1.0


class TestStrategy(RunStrategyConformance):
    @pytest.fixture
    def strategy(self):
        return ResultCache(Settings(gib=0.1, seconds=0.0))

    @pytest.fixture
    def programs(self):
        x, y = torch.randn(16, 16), torch.randn(16, 16)
        return {
            "a product": (lambda x, y: torch.relu(x @ y) + x, (x, y)),
            "a write": (lambda x, y: (x * y).add_(1.0).t(), (x, y)),
        }


class FakeResults(RunResults):
    def __init__(self, nbytes):
        self.nbytes, self.dropped = nbytes, False

    @property
    def held(self):
        return not self.dropped

    def drop(self):
        self.dropped = True


def test_cache_evicts_results_with_least_time_per_byte():
    cache = Cache(100)
    for name, nbytes, seconds in ((b"slow", 40, 4.0), (b"quick", 40, 0.4), (b"new", 30, 1.0)):
        cache.store(name, b"program", FakeResults(nbytes), seconds)
    assert [cache.find(name) is not None for name in (b"slow", b"quick", b"new")] == [True, False, True]
    assert cache.nbytes == 70


def test_cache_evicts_unused_results():
    cache = Cache(100)
    cache.store(b"old", b"program", FakeResults(40), 4.0)
    for number in range(20):
        cache.store(number.to_bytes(), b"program", FakeResults(40), 1.0)
    assert cache.find(b"old") is None


def test_number_of_small_results_is_limited(monkeypatch):
    monkeypatch.setattr(strategy, "MAX_ENTRIES", 3)
    cache = Cache(100)
    for number in range(20):
        cache.store(number.to_bytes(), b"program", FakeResults(1), 1.0)
    assert cache.nbytes == 3


def test_cache_removes_results_that_executor_dropped():
    cache, results = Cache(100), FakeResults(40)
    cache.store(b"one", b"program", results, 1.0)
    results.drop()
    assert cache.find(b"one") is None
    assert (cache.nbytes, dict(cache.programs)) == (0, {})


def test_results_over_half_the_budget_are_not_cached():
    cache, results = Cache(100), FakeResults(60)
    cache.store(b"one", b"program", results, 1.0)
    assert results.dropped
    assert cache.find(b"one") is None
