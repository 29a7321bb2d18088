"""Inputs that follow each other: two executors take them in turn, and only where that is right.

Where one executor does all of a program, that goes there in pieces while it is recorded.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import djinn
from djinn_client.interception.recording import program_prediction
from djinn_client.interception.recording.program_prediction import pieces_of
from djinn_client.interception.recording.recorder import recorders
from djinn_client.runtime import client
from djinn_client.runtime.pool.load_balancing import LoadBalancer, ProgramFamily
from djinn_client.runtime.pool.membership import Membership

REMOTE = "remote_accelerator:0"
REPEATS = 3
LENGTH = 200
IN_PIECES = len(pieces_of((1,) * LENGTH)) + 1


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
def given_to(spread, monkeypatch):
    """Lengths of the programs that each executor was given to run meanwhile."""
    lengths = defaultdict(list)

    def counting(number, run):
        def count(submission, prepared=None, values=()):
            if prepared is not None:
                lengths[number].append(len(prepared.nodes))
            return run(submission, prepared, values)

        return count

    for number, member in enumerate(spread.members):
        monkeypatch.setattr(member.submissions, "run", counting(number, member.submissions.run))
    return lengths


def stream(model, given):
    """Results that are not awaited one by one."""
    made = [model(batch.to(REMOTE)).to("cpu", non_blocking=True) for batch in given]
    return [one + 0 for one in made]


def all_equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.no_grad()
def test_executors_take_inputs_in_turn(given_to):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    with client.record_plans() as plans:
        assert all_equal(stream(ours, given), expected)
    # Not of those that came when the executors were done with what was before.
    assert any("the turn of this device" in plan.placement.decisions[-1].reason for plan in plans)
    stream(ours, given)  # the first one of a stream follows none, and copies of weights are there now: a plan more
    given_to.clear()
    with client.record_plans() as again:
        assert all_equal(stream(ours, given), expected)
    assert len(again) < len(given) / 2
    assert len(given_to) == 2


@torch.no_grad()
def test_where_each_is_waited_for_one_executor_is_enough(given_to):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours = model.to(REMOTE)
    assert all_equal([ours(batch.to(REMOTE)).cpu() for batch in given], expected)
    assert len(given_to) == 1


@torch.no_grad()
def test_weights_that_change_are_copied_anew(spread):
    model, given = network().eval(), batches()
    ours = network().eval().to(REMOTE)
    assert all_equal(stream(ours, given), [model(batch) for batch in given])
    for net in (model, ours):
        net[1].weight.mul_(2)
    assert all_equal(stream(ours, given), [model(batch) for batch in given])


@torch.no_grad()
def test_statistics_that_each_input_changes_have_one_order(given_to):
    model, given = network().train(), batches()
    ours = network().train().to(REMOTE)
    expected = [model(batch) for batch in given]
    with client.record_plans() as plans:
        assert all_equal(stream(ours, given), expected)
    reasons = {r.reason for p in plans for r in p.plan.results if r.optimization == "pipelining"}
    assert any("writes what the next program may read" in reason for reason in reasons)
    assert len(given_to) == 1
    torch.testing.assert_close(ours[2].running_mean.cpu(), model[2].running_mean)


@torch.no_grad()
def test_what_the_last_one_made_has_one_order(given_to):
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
    assert len(given_to) == 1


@torch.no_grad()
def test_data_that_is_there_already_is_taken_in_turn_as_well(given_to):
    model, given = network().eval(), batches()
    expected = [model(batch) for batch in given]
    ours, there = model.to(REMOTE), [batch.to(REMOTE) for batch in given]
    for _ in range(3):
        given_to.clear()
        made = [ours(batch).to("cpu", non_blocking=True) for batch in there]
        assert all_equal([one + 0 for one in made], expected)
    assert len(given_to) == 2


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


@pytest.fixture
def soon(monkeypatch):
    """Programs are predicted after a few runs."""
    monkeypatch.setattr(program_prediction, "MIN_REPEATS", REPEATS)
    recorders.predictable_programs.forget()


def chain(x, length=LENGTH, turn=-1):
    for i in range(length):
        x = x.mul(1.01) if i == turn else x.add(0.5)
    return x


def taken(given_to, run):
    """Number of programs that executors were given by `run`; only one of them was."""
    given_to.clear()
    run()
    (lengths,) = given_to.values()
    return len(lengths)


@pytest.fixture(params=[REMOTE, "remote_accelerator:2"])
def known(given_to, soon, request):
    """A program that is sent in pieces by now, of the pool or of one executor; its results are those of local PyTorch."""
    x = torch.arange(4.0)
    expected, there = chain(x), x.to(request.param)

    def run():
        assert torch.equal(chain(there).cpu(), expected)

    took = [taken(given_to, run) for _ in range(REPEATS + 3)]
    assert took[:REPEATS] == [1] * REPEATS
    assert took[-1] == IN_PIECES
    return run


def test_a_program_that_keeps_to_one_executor_goes_in_pieces(known, given_to):
    before = djinn.stats()["plans_made"]
    assert [taken(given_to, known) for _ in range(2)] == [IN_PIECES] * 2
    assert djinn.stats()["plans_made"] == before
    with client.record_plans():
        assert taken(given_to, known) == 1, "it is to be seen whole"
    assert taken(given_to, known) == IN_PIECES


def test_it_goes_whole_again_when_plans_are_made_anew(known, spread, given_to):
    spread.executors.planner.make_anew()  # as where an executor joins or leaves
    again = [taken(given_to, known) for _ in range(5)]
    assert again == [1, 1, 1, IN_PIECES, IN_PIECES]
    spread.executors.links.changes += 1
    assert [taken(given_to, known) for _ in range(5)] == [2, *again[:4]], "the first piece notices it"


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
def decoded(device, after=lambda: None, width=16, tokens=REPEATS + 6):
    """The tokens of a model, each of which is waited for, and its cache."""
    torch.manual_seed(4)
    words, layers = torch.randn(50, width).to(device), [Layer(width).to(device) for _ in range(8)]
    caches, token, found = [[torch.randn(1, 9, width).to(device) for _ in range(2)] for _ in layers], 0, []
    for _ in range(tokens):
        x = words[token].view(1, 1, -1)
        for number, layer in enumerate(layers):
            x, caches[number] = layer(x, caches[number])
        token = (x[0, 0] @ words.t()).argmax().item()
        found.append(token)
        after()
    return found, [one.cpu() for cache in caches for one in cache]


def test_decoding_goes_in_pieces(soon, given_to):
    programs = []

    def after():
        (lengths,) = given_to.values()
        programs.append(len(lengths))
        given_to.clear()

    djinn.synchronize()
    given_to.clear()
    tokens, caches = decoded(REMOTE, after)
    expected = decoded("cpu")
    assert tokens == expected[0]
    assert all_equal(caches, expected[1])
    assert programs[1:REPEATS] == [1] * (REPEATS - 1)
    assert programs[-1] > 2


def test_pieces_of_other_sizes_are_followed_by_whole_programs(soon, given_to):
    def sized(size):
        x = torch.arange(float(size))
        there = x.to(REMOTE)
        return lambda: torch.equal(chain(there).cpu(), chain(x))

    small, large = sized(4), sized(4096)
    for _ in range(REPEATS + 3):
        assert small()
    assert [taken(given_to, large) for _ in range(5)] == [2, 1, 1, 1, IN_PIECES]
    assert [taken(given_to, run) for run in (small, large) * 2] == [IN_PIECES] * 4


def test_whatever_follows_what_was_sent(soon, spread):
    def drawn(device, turn):
        torch.manual_seed(3)
        x = chain(torch.arange(4.0, device=device) * torch.rand(4, device=device), 60, turn)
        return (chain(x, turn=turn) * torch.rand(4, device=device)).cpu()

    for turn in [-1] * 6 + [3, 30, 40, 150, 199, -1, -1, 33, -1, -1, -1]:
        assert torch.equal(drawn(REMOTE, turn), drawn("cpu", turn)), turn


@torch.no_grad()
def test_executors_take_programs_in_turn_that_came_in_pieces_before(soon, given_to):
    model, given = network().eval(), batches()
    expected = [chain(model(batch), 100) for batch in given]
    ours = model.to(REMOTE)
    for _ in range(REPEATS + 3):
        given_to.clear()
        assert torch.equal(chain(ours(given[0].to(REMOTE)), 100).cpu(), expected[0])
    assert len(given_to) == 1
    for _ in range(2):
        given_to.clear()
        made = [chain(ours(batch.to(REMOTE)), 100).to("cpu", non_blocking=True) for batch in given]
        assert all_equal([one + 0 for one in made], expected)
    assert len(given_to) == 2


@torch.no_grad()
def test_a_thread_does_not_follow_the_pieces_of_another(soon, given_to):
    model, given = network().eval(), batches(2)
    expected = [chain(model(batch), 100) for batch in given]
    ours, there = model.to(REMOTE), [batch.to(REMOTE) for batch in given]

    @torch.no_grad()
    def whole(number):
        return chain(ours(there[number]), 100).cpu()

    for _ in range(REPEATS + 3):
        whole(0)
    given_to.clear()
    begun = chain(ours(there[0]), 80)
    assert len(given_to) == 1, "pieces of it were sent"
    with ThreadPoolExecutor(1) as other:
        found = other.submit(whole, 1).result()
    assert len(given_to) == 2, "the other thread has its own executor"
    assert all_equal([chain(begun, 20).cpu(), found], expected)
