"""The LRU cache and the back-off that all parts use."""

from __future__ import annotations

import pytest

from djinn_core.protocol.backoff import Backoff
from djinn_core.system.lru import LruCache


def test_least_recently_used_entry_is_evicted():
    cache = LruCache(2)
    assert [list(cache.store(key, key.upper())) for key in "ab"] == [[], []]
    assert (cache.use("a"), cache.use("x")) == ("A", None)
    assert list(cache.store("c", "C")) == ["B"]
    assert list(cache.items()) == [("a", "A"), ("c", "C")]


def test_lookup_does_not_renew_entry():
    cache = LruCache(2)
    cache.store("a", 1)
    cache.store("b", 2)
    assert cache.get("a") == 1
    assert not cache.store("a", 3)
    assert list(cache.store("c", 4)) == [2]
    assert dict(cache) == {"a": 3, "c": 4}


def test_backoff_doubles_to_maximum_and_resets():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.pause() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.pause() == 0.5


@pytest.mark.parametrize("times", [0, 1])
def test_backoff_jitter_stays_in_range(times):
    for _ in range(200):
        backoff = Backoff(1.0, 2.0)
        for _ in range(times):
            backoff.pause()
        assert 0.5 <= backoff.random_pause() / (times + 1) <= 1.5
