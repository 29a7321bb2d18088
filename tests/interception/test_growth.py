"""Work that grows with the length of lists and chains, counted and not timed."""

from __future__ import annotations

import sys

import pytest
import torch

import djinn
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.shape_inference import foreach_infer, write_checks

REMOTE = "remote_accelerator:0"
LONGEST = 100
LONGEST = 60  # instructions that a write to a view may take, however many views are between it and its base


@pytest.mark.parametrize("shapes", [[(4,)], [(4,), (2, 3), (), (0, 5)]], ids=["alike", "mixed"])
def test_foreach_infers_one_element_per_kind(embedded, monkeypatch, shapes):
    looked_at = []
    plain = foreach_infer.infer
    monkeypatch.setattr(
        foreach_infer, "infer", lambda func, args, *rest: looked_at.append(len(args[0])) or plain(func, args, *rest)
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


def count_python_calls(work):
    """Return the number of Python function calls in this thread during `work`."""
    found = [0]

    def count(_frame, event, _what):
        found[0] += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found[0]


def count_recorded_ops(work):
    """Return the number of instructions that `work` records."""
    djinn.synchronize()
    before = recorders.ops_captured
    work()
    djinn.synchronize()
    return recorders.ops_captured - before


def add_all(tensors, number):
    return torch._foreach_add(tensors, number)[-1].cpu()


def multiply_all(tensors, number):
    torch._foreach_mul_(tensors, number)
    return tensors[-1].cpu()


@pytest.mark.parametrize("work", [add_all, multiply_all])
def test_foreach_call_size_is_independent_of_length(embedded, work):
    sent = []
    for length in (50, 500):
        tensors = [torch.ones(3, device=REMOTE) for _ in range(length)]
        for _ in range(2):
            work(tensors, 1.5)
        djinn.reset_stats()
        work(tensors, 1.5)
        counts = djinn.stats()
        assert (counts["instructions_sent"], counts["messages_sent"], counts["ops_inferred"]) == (1, 1, 0)
        sent.append(counts["bytes_sent"])
    short, long = sent
    assert long <= short + 8  # numbers of handles may take more bytes


def fused(lists, number):
    numbers = {"lr": number, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    steps = [torch.ones((), device=REMOTE).clone() for _ in lists[0]]  # equal values, of which the plan makes one
    torch._fused_adam_(*lists, [], steps, **numbers, maximize=False)
    return lists[0][-1].cpu()


def test_cost_per_element_of_fused_lists_is_constant(embedded):
    counts = []
    for length in (50, 150, 450):
        lists = [[torch.full((4,), float(which), device=REMOTE) for _ in range(length)] for which in range(4)]
        djinn.synchronize()
        counts.append(count_python_calls(lambda there=lists, rate=1 / length: fused(there, rate)))
    short, long = (counts[1] - counts[0]) / 100, (counts[2] - counts[1]) / 300
    assert long < 1.2 * short


def test_foreach_mistake_raises_local_error(embedded):
    there = [torch.ones(4).to(REMOTE) for _ in range(20)]
    with pytest.raises(RuntimeError):
        torch._foreach_add(there, [*there[:19], torch.ones(3).to(REMOTE)])
    assert torch.stack(torch._foreach_add(there, there)).sum().item() == 160


def test_foreach_kernels_skip_overlap_check():
    assert not write_checks.refuses_overlap("aten::_foreach_add_.List")
    assert not write_checks.refuses_overlap("aten::_fused_adam_")
    assert write_checks.refuses_overlap("aten::add_.Tensor")
    assert write_checks.refuses_overlap("aten::copy_")


def test_view_chain_is_bounded(embedded):
    base = torch.arange(6.0).to(REMOTE)
    view = base
    for number in range(5 * LONGEST):
        view = view.view(2, 3) if number % 2 else view.view(6)
    assert view._base is base
    view.mul_(2)
    assert base.tolist() == [0, 2, 4, 6, 8, 10]
    weight = torch.ones(2, 3, device=REMOTE, requires_grad=True)
    # Autograd still knows that it writes to the base.
    assert count_recorded_ops(lambda: view.mul_(weight)) <= LONGEST
    assert count_recorded_ops(lambda: base.sum().backward()) <= LONGEST
    assert weight.grad.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_write_to_no_grad_view_chain_raises(embedded):
    with torch.no_grad():
        view = torch.arange(6.0).to(REMOTE)
        for number in range(3 * LONGEST):
            view = view.view(2, 3) if number % 2 else view.view(6)
    with pytest.raises(RuntimeError, match="no_grad mode"):
        view.mul_(torch.ones(2, 3, device=REMOTE, requires_grad=True))


def test_hooks_of_shortened_view_chain_run(embedded):
    base = torch.ones(4, device=REMOTE, requires_grad=True)
    view = base
    for number in range(3 * LONGEST):
        view = view.view(2, 2) if number % 2 else view.view(4)
        if number == LONGEST // 2:
            view.register_hook(lambda gradient: gradient * 3)
    view.sum().backward()
    assert base.grad.tolist() == [3.0] * 4


def view_chain(base, length, middle):
    """Return a chain of views of `base` that are scaled at the end, and the view at index `middle`."""
    view = kept = base
    for number in range(length):
        view = view.view(2, 3) if number % 2 else view.view(6)
        kept = view if number == middle else kept
    return view, kept


@pytest.mark.parametrize("middle", [1, LONGEST, 3 * LONGEST - 2])
def test_long_view_chain_gradients_equal_cpu(embedded, middle):
    found = []
    for device in ("cpu", REMOTE):
        base = torch.arange(6.0).to(device).requires_grad_()
        view, kept = view_chain(base, 3 * LONGEST, middle)
        kept.retain_grad()
        (view**3).sum().backward()
        view, other = view_chain(base, 3 * LONGEST, middle)
        (first,) = torch.autograd.grad((view**3).sum(), other, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), base)
        found.append([t.tolist() for t in (base.grad, kept.grad, first.detach(), second)])
    assert found[0] == found[1]


def test_view_chain_with_gradients_is_bounded(embedded):
    found = []
    for device in ("cpu", REMOTE):
        leaf = torch.arange(6.0).to(device).requires_grad_()
        base = leaf * 2
        view, kept = view_chain(base, 3 * LONGEST, LONGEST)
        assert view._base is base
        assert count_recorded_ops(lambda to=view, by=kept: to.mul_(by.detach().view_as(to) + 1)) <= LONGEST
        (base * kept).sum().backward()
        found.append((base.tolist(), leaf.grad.tolist(), kept.requires_grad))
        view, _ = view_chain(leaf, 3 * LONGEST, 0)
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            view.mul_(2)
    assert found[0] == found[1]


def test_shortened_views_record_nothing(embedded):
    base = torch.ones(4, device=REMOTE)
    base.view(-1)  # the call is known from now on
    count_recorded_ops = recorders.ops_captured
    view = base
    for _ in range(3 * LONGEST):
        view = view.view(-1)
    assert recorders.ops_captured == count_recorded_ops
    assert view.tolist() == [1.0] * 4
