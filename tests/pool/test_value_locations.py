"""Locations of values: the client's record of which executor holds each value."""

from __future__ import annotations

from djinn_core.ir.handles import make_handle, storage_of
from djinn_pool.value_locations import ValueLocations


def test_storage_lives_with_known_views():
    locations = ValueLocations()
    whole, view, unknown = (make_handle(7, number) for number in (1, 2, 1 << 30))
    locations.add_all((unknown, view, whole), ((2, 1, 64), (1, 1, 32)))
    locations.copy(view, (0,))
    assert locations.forget((unknown,)) == {}
    assert locations.forget((whole, whole)) == {1: [whole]}
    assert locations.homes == {storage_of(whole): 1}
    assert locations.forget((view,)) == {0: [view], 1: [view]}
    assert not locations.homes
    assert not +locations.held


def test_bytes_are_counted_once_per_executor():
    locations = ValueLocations()
    small, large = (make_handle(7, number) for number in (1, 2))
    locations.add(small, 0, 32)
    locations.copy(small, (2,))
    locations.add(large, 0, 64)
    assert locations.held == {0: 64, 2: 64}
    locations.add(make_handle(7, 3), 1, 64)  # a view that is made where its memory goes
    locations.move(small, 1)
    assert +locations.held == {1: 64, 2: 64}
    assert locations.end_copies([large, small]) == [(small, 2)]
    assert +locations.held == {1: 64}
