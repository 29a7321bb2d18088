"""Work that grows with the length of lists and chains, counted and not timed."""

from __future__ import annotations

import pytest
import torch

from djinn_core.interception.inference import lists, writes
from djinn_core.interception.ops.view_chains import LONGEST

REMOTE = "remote_accelerator:0"


@pytest.mark.parametrize("shapes", [[(4,)], [(4,), (2, 3), (), (0, 5)]], ids=["alike", "mixed"])
def test_one_element_of_each_kind_tells_what_a_list_becomes(embedded, monkeypatch, shapes):
    looked_at = []
    plain = lists.infer
    monkeypatch.setattr(
        lists, "infer", lambda func, args, *rest: looked_at.append(len(args[0])) or plain(func, args, *rest)
    )
    here = [torch.rand(shapes[n % len(shapes)]) for n in range(300)]
    there = [tensor.to(REMOTE) for tensor in here]
    expected = torch._foreach_mul(torch._foreach_add(here, 2.5), here)
    found = torch._foreach_mul(torch._foreach_add(there, 2.5), there)
    torch._foreach_sub_(found, there, alpha=2)
    torch._foreach_sub_(expected, here, alpha=2)
    assert set(looked_at) == {len(shapes)}
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert all(torch.equal(found[n].cpu(), expected[n]) for n in (0, 1, 2, 3, 299))


def test_a_mistake_in_a_list_is_raised_as_it_is_locally(embedded):
    there = [torch.ones(4).to(REMOTE) for _ in range(20)]
    with pytest.raises(RuntimeError):
        torch._foreach_add(there, [*there[:19], torch.ones(3).to(REMOTE)])
    assert torch.stack(torch._foreach_add(there, there)).sum().item() == 160


def test_kernels_over_lists_do_not_look_for_overlaps():
    assert not writes.refuses_overlap("aten::_foreach_add_.List")
    assert not writes.refuses_overlap("aten::_fused_adam_")
    assert writes.refuses_overlap("aten::add_.Tensor")
    assert writes.refuses_overlap("aten::copy_")


def test_the_way_of_a_view_to_its_base_has_an_end(embedded):
    base = torch.arange(6.0).to(REMOTE)
    view = base
    for number in range(5 * LONGEST):
        view = view.view(2, 3) if number % 2 else view.view(6)
        assert view.depth <= LONGEST
    assert view._base is base
    view.mul_(2)
    assert base.tolist() == [0, 2, 4, 6, 8, 10]
    weight = torch.ones(2, 3, device=REMOTE, requires_grad=True)
    view.mul_(weight)  # autograd still knows that it writes to the base
    base.sum().backward()
    assert weight.grad.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_a_view_from_a_block_without_gradients_is_not_written_afterwards(embedded):
    with torch.no_grad():
        view = torch.arange(6.0).to(REMOTE)
        for number in range(3 * LONGEST):
            view = view.view(2, 3) if number % 2 else view.view(6)
    with pytest.raises(RuntimeError, match="no_grad mode"):
        view.mul_(torch.ones(2, 3, device=REMOTE, requires_grad=True))


def test_hooks_on_the_way_run_where_gradients_are_wanted(embedded):
    base = torch.ones(4, device=REMOTE, requires_grad=True)
    view = base
    for number in range(3 * LONGEST):
        view = view.view(2, 2) if number % 2 else view.view(4)
        if number == LONGEST // 2:
            view.register_hook(lambda gradient: gradient * 3)
    view.sum().backward()
    assert base.grad.tolist() == [3.0] * 4
