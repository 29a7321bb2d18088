"""Bounded memo tables: plain dicts, because a hit must cost one lookup and nothing else.

What ops return is memoised in `shape_inference/inference_cache.py`, by keys that `dispatch.py` makes.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def make_room(known: dict[K, V], limit: int) -> None:
    """Evict the older half of a table that has reached `limit`."""
    if len(known) >= limit:
        for old in list(known)[: limit // 2]:
            known.pop(old, None)


def keep(known: dict[K, V], key: K, value: V, limit: int) -> V:
    """Return the entry under `key`, after storing `value` where there was none."""
    if key not in known:
        make_room(known, limit)
    return known.setdefault(key, value)
