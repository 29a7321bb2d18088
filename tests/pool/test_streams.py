"""Inputs that follow each other: two executors take them in turn, and only where that is right."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import djinn
from djinn_client.hookspecs.routers import Executors
from djinn_client.runtime import client
from djinn_pool.load_balancing import LoadBalancer, ProgramFamily

REMOTE = "remote_accelerator:0"
TOKENS = 6


@pytest.fixture(scope="module")
def stream_pool(make_pool):
    """Yield the router of two executors that divides programs if it pays."""
    with make_pool("cost_based") as router:
        yield router


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
def program_lengths(stream_pool, monkeypatch):
    """Return, by executor, the lengths of the programs that it ran since the start of the test."""
    lengths = defaultdict(list)

    def counting(number, run):
        def count(submission, prepared=None, values=()):
            if prepared is not None:
                lengths[number].append(len(prepared.nodes))
            return run(submission, prepared, values)

        return count

    for number, member in enumerate(stream_pool.executors.members):
        monkeypatch.setattr(member.submissions, "run", counting(number, member.submissions.run))
    return lengths


def stream(model, given):
    """Return results that are not awaited one by one."""
    made = [model(batch.to(REMOTE)).to("cpu", non_blocking=True) for batch in given]
    return [one + 0 for one in made]


def all_equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.no_grad()
def test_executors_alternate_inputs(program_lengths):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    with client.record_plans() as plans:
        assert all_equal(stream(ours, given), expected)
    # Not of those that came when the executors were done with what was before.
    assert any("the turn of this device" in plan.placement.decisions[-1].reason for plan in plans)
    stream(ours, given)  # the first one of a stream follows none, and copies of weights are there now: a plan more
    program_lengths.clear()
    with client.record_plans() as again:
        assert all_equal(stream(ours, given), expected)
    assert len(again) < len(given) / 2
    assert len(program_lengths) == 2


@torch.no_grad()
def test_awaited_inputs_stay_on_one_executor(program_lengths):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    assert all_equal([ours(batch.to(REMOTE)).cpu() for batch in given], expected)
    assert len(program_lengths) == 1


@torch.no_grad()
def test_changed_weights_are_copied_again(stream_pool):
    model, given = network().eval(), batches()
    ours = network().eval().to(REMOTE)
    assert all_equal(stream(ours, given), [model(batch) for batch in given])
    for net in (model, ours):
        net[1].weight.mul_(2)
    assert all_equal(stream(ours, given), [model(batch) for batch in given])


@torch.no_grad()
def test_stateful_statistics_keep_order(program_lengths):
    model, given = network().train(), batches()
    ours = network().train().to(REMOTE)
    expected = [model(batch) for batch in given]
    with client.record_plans() as plans:
        assert all_equal(stream(ours, given), expected)
    reasons = {r.reason for p in plans for r in p.plan.results if r.optimization == "pipelining"}
    assert any("writes a value that the next program may read" in reason for reason in reasons)
    assert len(program_lengths) == 1
    torch.testing.assert_close(ours[2].running_mean.cpu(), model[2].running_mean)


@torch.no_grad()
def test_dependent_inputs_keep_order(program_lengths):
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
    assert len(program_lengths) == 1


@torch.no_grad()
def test_resident_inputs_alternate_executors(program_lengths):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours, there = model.to(REMOTE), [batch.to(REMOTE) for batch in given]
    for _ in range(3):
        program_lengths.clear()
        made = [ours(batch).to("cpu", non_blocking=True) for batch in there]
        assert all_equal([one + 0 for one in made], expected)
    assert len(program_lengths) == 2


class FakeMember:
    """A fake executor and its replies. `answered`: numbers of the answered submissions."""

    def __init__(self):
        self.replies, self.answered = self, set()

    def has_arrived(self, number):
        return number in self.answered


def test_least_loaded_executor_is_next():
    executors = Executors()
    for _ in range(3):
        executors.enter(FakeMember())
    members = executors.members
    balancer, family = LoadBalancer(executors), ProgramFamily()
    assert balancer.propose(family) is None, "nothing is under way"
    family.under_way, family.last = {1}, 0
    balancer.record_request(0, 1)
    assert balancer.propose(family) == 1
    balancer.record_request(1, 1)
    family.last = 1
    assert balancer.propose(family) == 2
    balancer.record_request(2, 1)
    family.last = 2
    assert balancer.propose(family) == 0
    members[1].answered.add(1)
    assert balancer.propose(family) == 1
    family.unused_proposals.add(1)
    assert balancer.propose(family) == 0
    family.is_balanced = False
    assert balancer.propose(family) is None


@torch.no_grad()
def test_inputs_of_threads_form_a_stream(stream_pool):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(torch.no_grad()(lambda batch: ours(batch.to(REMOTE)).cpu()), given * 3))
    assert all_equal(found, expected * 3)


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.taking = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.giving, self.wide = torch.nn.Linear(width, width), torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, x, cache):
        query, *new = self.taking(self.norm(x)).chunk(3, -1)
        cache = [torch.cat([old, one], 1) for old, one in zip(cache, new, strict=True)]
        x = x + self.giving(torch.nn.functional.scaled_dot_product_attention(query, *cache))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x))), cache


@torch.no_grad()
def decode(device, width=16):
    """Return the tokens of a model, each of which is awaited, and its cache."""
    torch.manual_seed(4)
    words, layers = torch.randn(50, width).to(device), [Layer(width).to(device) for _ in range(8)]
    caches, token, found = [[torch.randn(1, 9, width).to(device) for _ in range(2)] for _ in layers], 0, []
    for _ in range(TOKENS):
        x = words[token].view(1, 1, -1)
        for number, layer in enumerate(layers):
            x, caches[number] = layer(x, caches[number])
        token = (x[0, 0] @ words.t()).argmax().item()
        found.append(token)
    return found, [one.cpu() for cache in caches for one in cache]


def test_decoding_stays_on_one_executor(program_lengths):
    djinn.synchronize()
    program_lengths.clear()
    tokens, caches = decode(REMOTE)
    expected = decode("cpu")
    assert tokens == expected[0]
    assert all_equal(caches, expected[1])
    (lengths,) = program_lengths.values()
    assert len(lengths) >= TOKENS


@torch.no_grad()
def test_formerly_awaited_programs_alternate(program_lengths):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    for _ in range(6):
        program_lengths.clear()
        assert torch.equal(ours(given[0].to(REMOTE)).cpu(), expected[0])
    assert len(program_lengths) == 1
    for _ in range(2):
        program_lengths.clear()
        assert all_equal(stream(ours, given), expected)
    assert len(program_lengths) == 2
