"""Residency: the client's record of which executor holds each value."""

from __future__ import annotations

from djinn_core.ir.values import make_handle, storage_of
from djinn_core.runtime.pool.residency import Residency


def test_memory_is_there_as_long_as_a_value_that_is_known_looks_into_it():
    residency = Residency()
    whole, view, unknown = (make_handle(7, number) for number in (1, 2, 1 << 30))
    residency.add(whole, 1, 64)
    residency.add(view, 1, 32)
    residency.copy(view, (0,))
    assert residency.forget(unknown) == []
    assert residency.forget(whole) == [1]
    assert residency.forget(whole) == []
    assert residency.homes == {storage_of(whole): 1}
    assert residency.forget(view) == [0, 1]
    assert not residency.homes
    assert not +residency.held
