"""Cache of values that are computed from weights, invalidated when the weights are written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.ir.handles import make_handle, new_storage, storage_of, storages_of, views_of
from djinn_core.ir.slot_arrays import Words
from djinn_core.sink import Submission
from djinn_core.system.lru import LruCache

if TYPE_CHECKING:
    from djinn_core.ir.substitution import Recipe

LIMIT = 4096  # sets of derived values that are kept; the least recently used go first
Key = tuple[Hashable, tuple[int, ...]]


class DerivedValues:
    """Derived values by what is computed and from which weights, for all plans that need them.

    The caller holds the sink's lock.

    Attributes:
        some: True once any was made.
    """

    def __init__(self, submit: Callable[[Submission], int]) -> None:
        """`submit`: submits the program that computes them."""
        self._submit = submit
        self._made: LruCache[Key, tuple[int, ...]] = LruCache(LIMIT)
        self._users: dict[int, set[Key]] = {}
        self._stale: list[int] = []
        self.some = False

    def extend(self, prepared: PreparedTemplate, values: Words) -> Words:
        """The values of a run, with those that are derived for it; they are made where they are not there."""
        if prepared.rewrite is None:
            return values
        extended = [values]
        for recipe, identity, positions in prepared.rewrite.recipes:
            sources = tuple([int(values[i]) for i in positions])
            key = (identity, sources)
            extended.append(np.array(self.made(key) or self.make(key, recipe, self._submit), np.int64))
        return np.concatenate(extended)

    def made(self, key: Key) -> tuple[int, ...] | None:
        """Values that a recipe of that identity made from those sources; None if there are none, or they are stale."""
        return self._made.use(key)

    def make(self, key: Key, recipe: Recipe, submit: Callable[[Submission], object]) -> tuple[int, ...]:
        """Have a recipe's values made, from the sources in `key`."""
        from djinn_client.interception.recording.substitute import recipe_for  # few programs have recipes

        sources = key[1]
        made = _fresh(recipe.makes)
        names = dict(zip(recipe.makes, made, strict=True))
        submit(Submission(recipe_for(recipe, dict(zip(recipe.sources, sources, strict=True)), names)))
        self.some = True
        for evicted in self._made.store(key, made):
            self._stale += evicted
        for storage in {storage_of(v) for v in sources}:
            self._users.setdefault(storage, set()).add(key)
        return made

    def touched(self, values: Iterable[int]) -> None:
        """Invalidate what was derived from these values: their memory is written, or the program has dropped them."""
        for value in values:
            for key in self._users.pop(storage_of(value), ()):
                self._forget(key)

    def take_stale(self) -> tuple[int, ...]:
        """Derived values that are of no use any more, to be freed with what is sent next."""
        stale, self._stale = tuple(self._stale), []
        return stale

    def take_all(self) -> tuple[int, ...]:
        """All derived values, to be freed; nothing uses them any more."""
        for keys in list(self._users.values()):
            for key in keys:
                self._forget(key)
        self._users.clear()
        return self.take_stale()

    def _forget(self, key: Key) -> None:
        self._stale += self._made.pop(key, ())


def _fresh(placeholders: Sequence[int]) -> tuple[int, ...]:
    """New handles that share memory as the placeholders do."""
    looked_into = storages_of(placeholders)
    storages = {storage: new_storage() for storage in dict.fromkeys(looked_into)}
    return tuple(map(make_handle, map(storages.__getitem__, looked_into), views_of(placeholders)))
