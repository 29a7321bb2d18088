"""References decide what is freed on an executor."""

from __future__ import annotations

import gc

import torch

import djinn
from djinn_client.interception.native.library import ops


class Phoenix:
    """An object that survives garbage collection, together with its tensor."""

    def __init__(self, tensor, nest):
        self.tensor, self.nest, self.cycle = tensor, nest, self

    def __del__(self):
        self.nest.append(self)


def freed_handles():
    """Return the handles of values without references, which can be freed on the executor."""
    return ops.freed(-1)[0]


def test_resurrected_value_is_not_freed(embedded):
    nest: list[Phoenix] = []
    Phoenix(torch.full((3,), 7.0, device=embedded), nest)
    djinn.synchronize()
    gc.collect()
    (phoenix,) = nest
    value = phoenix.tensor.remote
    handle = value.handle
    del value
    assert handle not in freed_handles()
    djinn.synchronize()
    torch.zeros(3, device=embedded).sum().item()
    assert phoenix.tensor.tolist() == [7.0, 7.0, 7.0]
    phoenix.tensor = None
    assert freed_handles().count(handle) == 1


def test_value_held_by_variable_is_not_freed(embedded):
    value = torch.ones(3, device=embedded).remote
    djinn.synchronize()
    assert freed_handles() == []
    handle = value.handle
    del value
    assert handle in freed_handles()


def test_shared_value_separates_before_shape_change(embedded):
    x = torch.arange(6.0, device=embedded).reshape(2, 3)
    y = x.detach()
    shared = x.remote.handle == y.remote.handle
    y.t_()
    assert (x.shape, y.shape) == ((2, 3), (3, 2))
    assert (x.tolist(), y.tolist()) == ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]])
    assert shared, "otherwise this says nothing"


def test_value_of_single_tensor_changes_in_place(embedded):
    x = torch.ones(2, 3, device=embedded)
    djinn.synchronize()
    before = djinn.stats()["ops_captured"]
    x.t_()
    assert x.shape == (3, 2)
    assert djinn.stats()["ops_captured"] - before == 1, "t_ alone, and no alias"
