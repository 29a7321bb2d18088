"""Inputs that follow each other: two executors take them in turn, and only where that is right."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from djinn_core.runtime import client
from djinn_core.runtime.pool.load_balancing import LoadBalancer, ProgramFamily
from djinn_core.runtime.pool.membership import Membership

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def spread(pooled):
    """Two executors; what is spread over them is what is worth it."""
    with pooled("cost_based") as session:
        yield session


def network(width=24):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(2):
        layers += [torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 5))


def batches(count=6):
    torch.manual_seed(1)
    return [torch.randn(2, 3, 64, 64) for _ in range(count)]


@pytest.fixture
def done(spread, monkeypatch):
    """Number of instructions that each executor was given to run meanwhile."""
    counted = Counter()

    def counting(number, run):
        def count(submission, prepared=None, values=()):
            counted[number] += len(prepared.nodes) if prepared is not None else 0
            return run(submission, prepared, values)

        return count

    for number, member in enumerate(spread.members):
        monkeypatch.setattr(member.submissions, "run", counting(number, member.submissions.run))
    return counted


def stream(model, given):
    """Results that are not awaited one by one."""
    made = [model(batch.to(REMOTE)).to("cpu", non_blocking=True) for batch in given]
    return [one + 0 for one in made]


def all_equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.no_grad()
def test_executors_take_inputs_in_turn(done):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    with client.record_plans() as plans:
        assert all_equal(stream(ours, given), expected)
    # Not of those that came when the executors were done with what was before.
    assert any("the turn of this device" in plan.placement.decisions[-1].reason for plan in plans)
    stream(ours, given)  # the first one of a stream follows none, and copies of weights are there now: a plan more
    done.clear()
    with client.record_plans() as again:
        assert all_equal(stream(ours, given), expected)
    assert len(again) < len(given) / 2
    assert done[0] > 0 < done[1]


@torch.no_grad()
def test_where_each_is_waited_for_one_executor_is_enough(done):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    assert all_equal([ours(batch.to(REMOTE)).cpu() for batch in given], expected)
    assert not (done[0] and done[1])


@torch.no_grad()
def test_weights_that_change_are_copied_anew(spread):
    model, given = network().eval(), batches()
    ours = network().eval().to(REMOTE)
    assert all_equal(stream(ours, given), [model(batch) for batch in given])
    for net in (model, ours):
        net[1].weight.mul_(2)
    assert all_equal(stream(ours, given), [model(batch) for batch in given])


@torch.no_grad()
def test_statistics_that_each_input_changes_have_one_order(done):
    model, given = network().train(), batches()
    ours = network().train().to(REMOTE)
    expected = [model(batch) for batch in given]
    with client.record_plans() as plans:
        assert all_equal(stream(ours, given), expected)
    reasons = {r.reason for p in plans for r in p.plan.results if r.optimization == "pipelining"}
    assert any("writes what the next program may read" in reason for reason in reasons)
    assert not (done[0] and done[1])
    torch.testing.assert_close(ours[2].running_mean.cpu(), model[2].running_mean)


@torch.no_grad()
def test_what_the_last_one_made_has_one_order(done):
    torch.manual_seed(2)
    cell = torch.nn.Conv2d(8, 8, 3, padding=1)
    expected, state = [], torch.randn(2, 8, 128, 128)
    ours, there, made = torch.nn.Conv2d(8, 8, 3, padding=1), state.to(REMOTE), []
    ours.load_state_dict(cell.state_dict())
    ours = ours.to(REMOTE)
    for _ in range(5):
        state = cell(cell(state)).tanh()
        expected.append(state.mean())
        there = ours(ours(there)).tanh()
        made.append(there.mean().to("cpu", non_blocking=True))
    assert all_equal([one + 0 for one in made], expected)
    assert not (done[0] and done[1])


@torch.no_grad()
def test_data_that_is_there_already_is_taken_in_turn_as_well(done):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours, there = model.to(REMOTE), [batch.to(REMOTE) for batch in given]
    for _ in range(3):
        done.clear()
        made = [ours(batch).to("cpu", non_blocking=True) for batch in there]
        assert all_equal([one + 0 for one in made], expected)
    assert done[0] > 0 < done[1]


class Answering:
    """Stands for an executor's session: what it has answered is in `answered`."""

    def __init__(self):
        self.answered = set()

    def has_come(self, number):
        return number in self.answered


def test_it_is_the_turn_of_who_has_least_to_do():
    membership = Membership()
    for _ in range(3):
        membership.enter(Answering())
    members = membership.members
    turns, alike = LoadBalancer(membership), ProgramFamily()
    assert turns.next(alike) is None, "nothing is under way"
    alike.under_way, alike.last = {1}, 0
    turns.asked(0, 1)
    assert turns.next(alike) == 1
    turns.asked(1, 1)
    alike.last = 1
    assert turns.next(alike) == 2
    turns.asked(2, 1)
    alike.last = 2
    assert turns.next(alike) == 0
    members[1].answered.add(1)
    assert turns.next(alike) == 1
    alike.passed_over.add(1)
    assert turns.next(alike) == 0
    alike.takes_turns = False
    assert turns.next(alike) is None


@torch.no_grad()
def test_threads_that_wait_for_their_own_are_a_stream_too(spread):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(torch.no_grad()(lambda batch: ours(batch.to(REMOTE)).cpu()), given * 3))
    assert all_equal(found, expected * 3)
