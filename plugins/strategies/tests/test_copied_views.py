"""Writes into copies that stand for views reach the viewed tensor, or are refused."""

from __future__ import annotations

import pytest
import torch

from djinn_strategies.compiling.copied_views import CopiedViews, StaleViewError

POSITIONS = torch.tensor([2])


def test_write_into_a_copied_slice_is_stored():
    views, table = CopiedViews(), torch.zeros(2, 4)
    entry = views.select(table, 1, POSITIONS).squeeze(1)
    entry.copy_(torch.tensor([5.0, 6.0]))
    views.store_copy(entry)
    assert table.tolist() == [[0, 0, 5, 0], [0, 0, 6, 0]]


@pytest.mark.parametrize("through", ["table", "copy"])
def test_write_is_refused_while_another_copy_is_used(through):
    views, table = CopiedViews(), torch.zeros(2, 4)
    older = views.select(table, 1, POSITIONS)
    written = views.select(table, 1, POSITIONS) if through == "copy" else table
    with pytest.raises(StaleViewError):
        views.store_copy(written)
    del older
    views.store_copy(written)


def test_write_into_a_copy_with_other_strides_is_refused():
    views, table = CopiedViews(), torch.zeros(2, 4)
    flat = table[:, :2].reshape(4)
    views.record_view(table, flat)
    with pytest.raises(StaleViewError):
        views.store_copy(flat)


def test_write_into_a_copy_of_a_copy_is_refused():
    views, table = CopiedViews(), torch.zeros(2, 4)
    entries = views.select(table, 1, POSITIONS)
    inner = views.select(entries, 0, torch.tensor([1]))
    with pytest.raises(StaleViewError):
        views.store_copy(inner)


def test_view_of_a_tensor_is_no_copy():
    views, table = CopiedViews(), torch.zeros(2, 4)
    view = table[:, 1]
    views.record_view(table, view)
    views.store_copy(view)
    views.store_copy(table)
