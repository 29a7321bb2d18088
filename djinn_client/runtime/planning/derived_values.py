"""Cache of values that are computed from weights. Writing the weights invalidates them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_client.sink import Submission
from djinn_core.ir.handles import make_handle, new_storage, storage_of, storages_of, views_of
from djinn_core.ir.slot_arrays import Words
from djinn_core.system.lru import LruCache

if TYPE_CHECKING:
    from djinn_core.ir.substitution import Recipe

LIMIT = 4096  # limit of cached sets of derived values; the least recently used are evicted first
Key = tuple[Hashable, tuple[int, ...]]


class DerivedValues:
    """Cache of values that recipes compute from weights, keyed by recipe and weights, for all plans.

    The caller holds the sink's lock.

    Attributes:
        has_values: True once a value was computed.
    """

    def __init__(self, submit: Callable[[Submission], int]) -> None:
        """Create an empty cache. `submit`: submits the program that computes derived values."""
        self._submit = submit
        self._cached: LruCache[Key, tuple[int, ...]] = LruCache(LIMIT)
        self._users: dict[int, set[Key]] = {}
        self._stale: list[int] = []
        self.has_values = False

    def extend(self, prepared: PreparedTemplate, values: Words) -> Words:
        """Return `values`, the values of a run, followed by the derived values that it uses.

        Derived values that are not cached are computed first.
        """
        if prepared.rewrite is None:
            return values
        rows = [values]
        for recipe, identity, positions in prepared.rewrite.recipes:
            sources = tuple([int(values[i]) for i in positions])
            key = (identity, sources)
            rows.append(np.array(self.cached(key) or self.compute(key, recipe, self._submit), np.int64))
        return np.concatenate(rows)

    def cached(self, key: Key) -> tuple[int, ...] | None:
        """Return the cached values of a key (a recipe with its source weights), or None if they are missing or stale."""
        return self._cached.use(key)

    def compute(self, key: Key, recipe: Recipe, submit: Callable[[Submission], object]) -> tuple[int, ...]:
        """Compute the values of a recipe from the weights in `key`, cache them, and return their handles."""
        from djinn_client.interception.recording.substitute import recipe_for  # few programs have recipes

        sources = key[1]
        handles = _fresh(recipe.placeholders)
        names = dict(zip(recipe.placeholders, handles, strict=True))
        submit(Submission(recipe_for(recipe, dict(zip(recipe.sources, sources, strict=True)), names)))
        self.has_values = True
        for evicted in self._cached.store(key, handles):
            self._stale += evicted
        for storage in {storage_of(v) for v in sources}:
            self._users.setdefault(storage, set()).add(key)
        return handles

    def invalidate(self, values: Iterable[int]) -> None:
        """Invalidate values that were derived from these values, because a program writes or drops them."""
        for value in values:
            for key in self._users.pop(storage_of(value), ()):
                self._forget(key)

    def take_stale(self) -> tuple[int, ...]:
        """Forget the stale derived values, and return them to be freed with the next submission."""
        stale, self._stale = tuple(self._stale), []
        return stale

    def take_all(self) -> tuple[int, ...]:
        """Forget all derived values, and return them to be freed. The caller guarantees that no program uses them."""
        for keys in list(self._users.values()):
            for key in keys:
                self._forget(key)
        self._users.clear()
        return self.take_stale()

    def _forget(self, key: Key) -> None:
        self._stale += self._cached.pop(key, ())


def _fresh(placeholders: Sequence[int]) -> tuple[int, ...]:
    """Return new handles that share memory like the placeholders."""
    storage_ids = storages_of(placeholders)
    storages = {storage: new_storage() for storage in dict.fromkeys(storage_ids)}
    return tuple(map(make_handle, map(storages.__getitem__, storage_ids), views_of(placeholders)))
