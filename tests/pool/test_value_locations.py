"""Locations of values: the client's record of which executor holds each value."""

from __future__ import annotations

from djinn_core.ir.values import make_handle, storage_of
from djinn_core.runtime.pool.value_locations import ValueLocations


def test_memory_is_there_as_long_as_a_value_that_is_known_looks_into_it():
    locations = ValueLocations()
    whole, view, unknown = (make_handle(7, number) for number in (1, 2, 1 << 30))
    locations.add(whole, 1, 64)
    locations.add(view, 1, 32)
    locations.copy(view, (0,))
    assert locations.forget(unknown) == []
    assert locations.forget(whole) == [1]
    assert locations.forget(whole) == []
    assert locations.homes == {storage_of(whole): 1}
    assert locations.forget(view) == [0, 1]
    assert not locations.homes
    assert not +locations.held
