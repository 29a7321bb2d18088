"""The memory behind the valid entries of a buffer: zero, or entries of the same sequence."""

from __future__ import annotations

import math

import pytest
import torch

from djinn_strategies.compiling.growing_region import GrowingBuffer, new_buffer


def test_new_buffer_is_cleared(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(*shape, math.nan, **options))
    buffer = new_buffer(torch.ones(2, 3, 4), 8, 1, 0)
    assert buffer.memory.shape == (2, 8, 4)
    assert not buffer.memory.any()


@pytest.mark.parametrize("rest", [math.nan, math.inf, 7.0])
def test_load_clears_entries_of_longer_sequence(rest):
    buffer = GrowingBuffer(torch.zeros(2, 8, 4), 1, 0)
    buffer.load(torch.full((2, 5, 4), rest))
    buffer.memory[:, 5] = rest  # as a graph appends
    buffer.set_used(6)
    buffer.load(torch.ones(2, 3, 4))
    assert torch.equal(buffer.first_entries(3), torch.ones(2, 3, 4))
    assert not buffer.memory[:, 3:].any()
    assert buffer.holds(buffer.first_entries(3))
    assert not buffer.holds(buffer.first_entries(4))


def test_buffer_stays_allocated_while_session_has_view():
    buffer = GrowingBuffer(torch.zeros(2, 8, 4), 1, 0)
    buffer.set_baseline()
    part = buffer.first_entries(3)
    assert buffer.is_held()
    assert not buffer.is_held(allowed_views=1)
    del part
    assert not buffer.is_held()
