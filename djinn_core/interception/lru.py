"""Bounded caches."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep(known: dict[K, V], key: K, value: V, limit: int) -> V:
    """Return the entry under `key`, after storing `value` where there was none. A full cache evicts its older half."""
    if len(known) >= limit and key not in known:
        for old in list(known)[: limit // 2]:
            known.pop(old, None)
    return known.setdefault(key, value)
