"""Counts of references decide what is freed on an executor: each must be right on every version of Python."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

import djinn
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.native import library as native
from djinn_core.interception.tensors.storage import take_freed
from djinn_core.reference_counts import counts_beside, only_listed

if native.ON:
    from djinn_core.interception.native.library import ops


class Thing:
    held = None


def counted_of_an_argument(thing):
    return counts_beside([thing])


def test_an_object_that_is_only_listed():
    assert counts_beside([Thing(), Thing()]) == [0, 0]
    assert counts_beside((Thing(),)) == [0]
    assert counts_beside([Thing() for _ in range(1000)]) == [0] * 1000
    assert counts_beside([]) == []
    assert only_listed([])
    assert only_listed([Thing(), Thing()])


def test_objects_that_are_not_only_listed():
    local = Thing()
    assert not only_listed([Thing(), local])
    assert not only_listed([local.__dict__])
    assert not only_listed([Thing()] * 2)


def test_each_reference_of_the_program_counts():
    local = Thing()
    assert counts_beside([local]) == [1]
    other = Thing()
    other.held = local
    assert counts_beside([local, other, Thing()]) == [2, 1, 0]
    listed = [local, local]
    assert counts_beside(listed) == [3, 3], "the local, the attribute, and the list's other place"
    del local
    assert counts_beside([other.held]) == [3]


def test_a_variable_of_a_caller_counts_at_least_once():
    """From 3.14 on an argument may borrow its caller's reference."""
    local = Thing()
    assert counted_of_an_argument(local)[0] in {1, 2}
    assert counted_of_an_argument(Thing())[0] == 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda thing: [thing],
        lambda thing: lambda default=thing: default,
        lambda thing: lambda: thing,
        lambda thing: (held for held in [thing]),
        lambda thing: functools.partial(print, thing),
    ],
)
def test_a_reference_that_no_variable_has_counts(keep):
    listed = [Thing()]
    kept = keep(listed[0])
    assert counts_beside(listed) == [1]
    del kept
    assert counts_beside(listed) == [0]


class Phoenix:
    """Lives on after it was found to be garbage, with what it holds."""

    def __init__(self, tensor, nest):
        self.tensor, self.nest, self.cycle = tensor, nest, self

    def __del__(self):
        self.nest.append(self)


def freed_handles():
    """The handles of values without references; these can be freed on the executor."""
    return ops.freed(-1)[0] if native.ON else [gone.handle for gone in take_freed()]


def test_a_value_that_came_back_is_not_freed(embedded):
    nest: list[Phoenix] = []
    Phoenix(torch.full((3,), 7.0, device=embedded), nest)
    djinn.synchronize()
    gc.collect()
    (phoenix,) = nest
    value = phoenix.tensor.remote
    if not native.ON:
        assert any(value is waiting for waiting in device_state.freed), "its finalizer has run"
    handle = value.handle
    del value
    assert handle not in freed_handles()
    djinn.synchronize()
    torch.zeros(3, device=embedded).sum().item()
    assert phoenix.tensor.tolist() == [7.0, 7.0, 7.0]
    phoenix.tensor = None
    assert freed_handles().count(handle) == 1


def test_a_value_held_by_a_variable_alone_is_not_freed(embedded):
    value = torch.ones(3, device=embedded).remote
    djinn.synchronize()
    if not native.ON:
        device_state.freed.append(value)
    assert freed_handles() == []
    assert native.ON or value in device_state.freed
    handle = value.handle
    del value
    assert handle in freed_handles()


def test_tensors_that_share_a_value_part_before_one_changes_its_shape(embedded):
    x = torch.arange(6.0, device=embedded).reshape(2, 3)
    y = x.detach()
    shared = x.remote.handle == y.remote.handle
    y.t_()
    assert (x.shape, y.shape) == ((2, 3), (3, 2))
    assert (x.tolist(), y.tolist()) == ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]])
    assert shared, "otherwise this says nothing"


def test_a_value_that_has_one_tensor_changes_in_place(embedded):
    x = torch.ones(2, 3, device=embedded)
    djinn.synchronize()
    before = djinn.stats()["ops_captured"]
    x.t_()
    assert x.shape == (3, 2)
    assert djinn.stats()["ops_captured"] - before == 1, "t_ alone, and no alias"
