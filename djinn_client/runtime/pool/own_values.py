"""Values that only a rewritten program has: each run allots them new handles, as executors send them to each other."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_core.ir.handles import make_handle, new_storage, storage_of, storages_of, views_of
from djinn_core.ir.substitution import RewrittenProgram

# By value: the number of its storage in the plan; the position of a value of the recorded program that looks into the same
# memory, or -1; and its number among those that do.
Own = tuple[tuple[int, int, int], ...]


def own_values(rewritten: RewrittenProgram) -> Own:
    """Those of a rewritten program that come after the recorded ones and the derived ones, in the order of its values."""
    recorded = dict.fromkeys(rewritten.origin.operands)
    derived = {value for recipe in rewritten.recipes for value in recipe.makes}
    anchors: dict[int, int] = {}
    for position, value in enumerate(recorded):
        anchors.setdefault(storage_of(value), position)
    own = [v for v in rewritten.values if v not in recorded and v not in derived]
    return tuple((s, anchors.get(s, -1), view) for s, view in zip(storages_of(own), views_of(own), strict=True))


def named(own: Own, values: Sequence[int]) -> list[int]:
    """Handles for the values of a run, of which those of the recorded program are `values`."""
    storages: dict[int, int] = {}
    made = []
    for storage, anchor, view in own:
        there = storages.get(storage)
        if there is None:
            there = storages[storage] = storage_of(values[anchor]) if anchor >= 0 else new_storage()
        made.append(make_handle(there, view))
    return made
