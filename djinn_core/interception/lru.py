"""Tables of what is known that keep their size."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep(known: dict[K, V], key: K, value: V, limit: int) -> V:
    """What is under `key`: `value` where nothing was. The older half goes when there are `limit`."""
    if len(known) >= limit and key not in known:
        for old in list(known)[: limit // 2]:
            known.pop(old, None)
    return known.setdefault(key, value)
