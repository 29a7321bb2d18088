"""Handles and slots survive the short form that they travel in, and nothing else is accepted for it."""

from __future__ import annotations

import math

import pytest
from bound_changes import changes
from hypothesis import given
from hypothesis import strategies as st

from djinn_core.errors import ProtocolError
from djinn_core.ir.handles import make_handle
from djinn_core.wire.binding_delta import (
    apply_input_changes,
    apply_slot_changes,
    pack_handles,
    unpack_handles,
)

handles = st.builds(lambda s, v: s << 32 | v, st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 32) - 1))
slots = st.one_of(st.integers(-3, 3), st.floats(width=64), st.sampled_from([0, 0.0, -0.0, 1, 1.0]))


@given(st.lists(handles))
def test_handles_round_trip(given_handles):
    assert unpack_handles(pack_handles(given_handles)) == given_handles


@given(st.lists(st.tuples(handles, handles, st.booleans())))
def test_input_changes_round_trip(pairs):
    before = [old for old, _, _ in pairs]
    after = [new if differs else old for old, new, differs in pairs]
    apply_input_changes(now := list(before), changes((before, ()), (after, ()))[0])
    assert now == after


def exact_key(value):
    """Return a key that distinguishes slots such as 1 and 1.0, or 0.0 and -0.0."""
    return type(value), math.copysign(1, value), "nan" if value != value else value  # noqa: PLR0124


@given(st.lists(st.tuples(slots, slots)))
def test_slot_changes_round_trip(pairs):
    before, after = [old for old, _ in pairs], [new for _, new in pairs]
    apply_slot_changes(now := list(before), changes(([], before), ([], after))[1])
    assert list(map(exact_key, now)) == list(map(exact_key, after))


def test_equal_slot_values_are_sent_once():
    _, found = changes(([], [7] * 100), ([], [8] * 100))
    assert [slot for slot, _ in found] == [8]


def test_consecutive_handles_pack_small():
    packed = pack_handles([make_handle(1000 + i, 1) for i in range(50)])
    assert max(packed[2:]) == 1


@pytest.mark.parametrize("packed", [(1,), (-1, 1), (1, -1), (1 << 31, 0), (1, 1 << 32), (5, 1, -6, 1)])
def test_invalid_handles_are_refused(packed):
    with pytest.raises(ProtocolError):
        unpack_handles(packed)


@pytest.mark.parametrize("changes", [(0, 1), (3, 1, 1), (-1, 1, 1), (0, -1, 1), (0, 1, 1 << 32), (0, 1 << 31, 1)])
def test_invalid_bindings_are_refused(changes):
    with pytest.raises(ProtocolError):
        apply_input_changes([1, 2, 3], changes)


@pytest.mark.parametrize("changes", [((1, (3,)),), ((1, (-1,)),), ((1, (2, 1)),)])
def test_invalid_slots_are_refused(changes):
    with pytest.raises(ProtocolError):
        apply_slot_changes([1, 2, 3], changes)
