"""Several executors as one device: whatever runs where, results are those of one."""

from __future__ import annotations

import copy
import gc
import signal

import pytest
import torch
from compared_layouts import equal, one_of_each, ops_on_each, plain
from figures import figures

import djinn
from djinn.testing import kill_executor
from djinn_client.interception.async_fetch import fetch_later
from djinn_client.runtime.receiving.replies import Replies
from djinn_core.ir.handles import storage_of
from djinn_core.wire.peer_messages import PeerTicket

REMOTE = "remote_accelerator:0"


def value_counts(router):
    """Return the number of values on each executor after all dead values were freed."""
    gc.collect()
    djinn.synchronize()
    return [figures(member)["values"] for member in router.executors.members]


def test_work_runs_on_both_executors(round_robin_pool):
    given = torch.arange(12.0).reshape(3, 4)
    before = [member.submissions.last_number for member in round_robin_pool.executors.members]
    ours = given.to(REMOTE)
    assert torch.equal((ours @ ours.T + 1).relu().cpu(), (given @ given.T + 1).relu())
    assert all(
        member.submissions.last_number > number
        for member, number in zip(round_robin_pool.executors.members, before, strict=True)
    )


def test_writes_through_views_and_copies_equal_cpu(round_robin_pool):
    def run(device):
        base = torch.arange(24.0, device=device).reshape(4, 6)
        view, column = base[1:], base[:, ::5]
        total = base.sum() + column.sum()
        view.mul_(2)
        column.add_(total)
        again = column.sum(0)
        base[0] = 7
        return [t.cpu() for t in (base, view, column, again, column[1:].t() @ view)]

    for ours, theirs in zip(run(REMOTE), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_writes_are_seen_by_next_program(round_robin_pool):
    ours, theirs = torch.ones(5, device=REMOTE), torch.ones(5)
    for step in range(6):
        for state in (ours, theirs):
            state.mul_(1.5).add_(step)
        assert torch.equal((ours * 2 + ours.sum()).cpu(), theirs * 2 + theirs.sum())


def test_training_equals_cpu(round_robin_pool):
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )
    ours = copy.deepcopy(theirs).to(REMOTE)
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in (ours, theirs)]
    for _ in range(4):
        batch = torch.randn(6, 8)
        losses = []
        for model, optimizer, given in zip((ours, theirs), optimizers, (batch.to(REMOTE), batch), strict=True):
            optimizer.zero_grad()
            loss = model(given).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine.cpu(), other)


def test_random_numbers_equal_one_executor(round_robin_pool):
    def draw():
        torch.manual_seed(7)
        first = torch.randn(5, device=REMOTE).cpu()
        dropped = torch.nn.functional.dropout(torch.ones(20, device=REMOTE)) + 1
        return first, dropped.cpu(), torch.rand(3, device=REMOTE).cpu()

    for one, other in zip(draw(), draw(), strict=True):
        assert torch.equal(one, other)


def test_data_dependent_shapes_equal_cpu(round_robin_pool):
    given = torch.tensor([3.0, -1.0, 2.0, -5.0])
    ours = given.to(REMOTE)
    assert torch.equal(torch.nonzero(ours > 0).cpu(), torch.nonzero(given > 0))
    assert torch.equal((ours[ours > 0] * 2).cpu(), given[given > 0] * 2)


def test_dtypes_and_layouts_are_transferred(round_robin_pool):
    for given in (
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        torch.randn(4, 5).bfloat16()[:, 1:3],
        torch.randn(3, 1).expand(3, 4),
        torch.zeros(0, 3),
        torch.tensor(True),
    ):
        ours = given.to(REMOTE)
        together = torch.stack([ours, ours])
        assert torch.equal(together.cpu(), torch.stack([given, given]))
        assert together.stride() == torch.stack([given, given]).stride()


@pytest.mark.filterwarnings("ignore:(Sparse|.*functions that produce)")
def test_sparse_and_nested_parts_are_transferred(round_robin_pool):
    """One executor combines the parts, which any executor may have computed."""
    held, expected = one_of_each(REMOTE), one_of_each("cpu")
    assert equal(plain(held), plain(expected))
    for ours, theirs in zip(held[1:3], expected[1:3], strict=True):
        scaled = [one.values().mul_(3).add_(1).sub_(2) for one in (ours, theirs)]  # ops in turns on both
        assert equal(*map(plain, scaled))
    assert equal(plain(ops_on_each(held)), plain(ops_on_each(expected)))
    held[0].mul_(2)
    assert equal(plain(held[0].coalesce()), plain(expected[0].mul_(2).coalesce()))


def test_values_are_freed_on_both_executors(round_robin_pool):
    before = value_counts(round_robin_pool)
    kept = torch.arange(100.0).to(REMOTE)
    for _ in range(5):
        other = (kept * 2 + 1) @ (kept - 3)
        other.item()
    del other
    assert sum(value_counts(round_robin_pool)) == sum(before) + 1
    del kept
    assert value_counts(round_robin_pool) == before


def test_failure_follows_dependent_values(round_robin_pool):
    table = torch.ones(3, 2, device=REMOTE)
    found = torch.nn.functional.embedding(torch.tensor([99], device=REMOTE), table)
    fine = table * 2
    later = (found @ fine.t() + 1).relu().sum()
    with pytest.raises(IndexError, match="out of range") as caught:
        later.item()
    assert "test_pool.py" in str(caught.value)
    assert torch.equal(fine.cpu(), 2 * torch.ones(3, 2))
    djinn.synchronize()  # the failure was seen


def test_unseen_failure_is_raised_once(round_robin_pool):
    found = torch.nn.functional.embedding(torch.tensor([99], device=REMOTE), torch.ones(3, 2, device=REMOTE))
    with pytest.raises(IndexError):
        djinn.synchronize()
    djinn.synchronize()
    del found


def test_uploads_wait_for_first_use(round_robin_pool):
    unused = torch.ones(1000).to(REMOTE)
    djinn.synchronize()
    assert sum(figures(member)["memory"] for member in round_robin_pool.executors.members) < 4000
    assert unused.sum().item() == 1000


def test_waiting_uploads_are_snapshots(round_robin_pool):
    source = torch.zeros(4)
    ours = source.to(REMOTE)
    source.fill_(5)
    assert ours.tolist() == [0, 0, 0, 0]


def test_plans_are_reused(round_robin_pool):
    state = torch.zeros(3, device=REMOTE)
    for _ in range(3):
        state = (state + 1) * 2
        state.tolist()
    djinn.reset_stats()
    for _ in range(5):
        state = (state + 1) * 2
        state.tolist()
    assert djinn.stats()["plans_made"] == 0
    assert djinn.stats()["templates_sent"] == 0


def kill(number):
    """Kill one of the executors."""
    kill_executor(number)


def test_upload_and_fetch_need_no_program(round_robin_pool):
    given = torch.arange(4.0)
    ours = given.to(REMOTE)
    later = ours + 1
    assert torch.equal(ours.cpu(), given)  # sends the program that uses it, and fetches it
    assert torch.equal(later.cpu(), given + 1)
    del ours, later


def test_dead_uploads_are_not_held(round_robin_pool):
    kept = torch.ones(3).to(REMOTE)
    for _ in range(3):
        dropped = torch.ones(1000).to(REMOTE) * 2  # never read
        del dropped
        (kept + 1).tolist()
    djinn.synchronize()
    assert not round_robin_pool._uploads._uploads


def raise_interrupt(*_, **__):
    raise KeyboardInterrupt


def test_interrupted_fetch_can_be_repeated(round_robin_pool, monkeypatch):
    given = torch.arange(3.0).to(REMOTE)
    pending = fetch_later([given + 1, given * 2, given - 1])
    assert len(pending._ticket.waiting) == 2
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("djinn_client.runtime.sending.cancellation.GRACE_SECONDS", 1000.0)  # nothing is stopped
        patch.setattr(round_robin_pool.executors.members[1].replies, "receive_until", raise_interrupt)
        pending.result()
    assert [value.tolist() for value in pending.result()] == [[1, 2, 3], [0, 2, 4], [-1, 0, 1]]


def test_interrupt_waits_until_program_is_sent(round_robin_pool, monkeypatch):
    state = torch.ones(4).to(REMOTE)
    djinn.synchronize()
    expect = round_robin_pool._routes.expect

    def interrupted_once(*arguments):
        monkeypatch.undo()
        monkeypatch.setattr("djinn_client.runtime.sending.cancellation.GRACE_SECONDS", 1000.0)  # nothing is stopped
        signal.raise_signal(signal.SIGINT)
        expect(*arguments)

    monkeypatch.setattr(round_robin_pool._routes, "expect", interrupted_once)
    doubled = state * 2
    state.add_(doubled.sin() @ doubled + doubled.exp())
    expected = torch.ones(4).add_((torch.ones(4) * 2).sin() @ (torch.ones(4) * 2) + (torch.ones(4) * 2).exp())
    with pytest.raises(KeyboardInterrupt):
        state.sum().item()
    assert torch.equal(state.cpu(), expected)
    assert torch.equal((doubled + 1).cpu(), torch.full((4,), 3.0))
    djinn.synchronize()  # the reply of the executor that was not fetched from may be under way
    assert not any(
        member.replies.pending or member.replies._early_replies for member in round_robin_pool.executors.members
    )


def run_with_kills(killed):
    """Return results of in-place updates and dropout on a state. Executors are killed at the given steps."""
    torch.manual_seed(3)
    state, rate = torch.ones(50).to(REMOTE), torch.full((50,), 0.5).to(REMOTE)
    found = []
    for step in range(16):
        for number in killed.get(step, ()):
            kill(number)
        state.mul_(rate).add_(torch.nn.functional.dropout(state.sin() @ rate + state, 0.3))
        found.append(state.sum().item() if step % 2 else None)
    return found


def test_dead_executors_are_replaced(round_robin_pool):
    expected = run_with_kills({})
    assert run_with_kills({3: [1], 11: [0, 1]}) == expected
    assert figures(round_robin_pool)["peer_bytes"] > 0  # of the new ones


# --- pools of their own, which end the one above


def test_value_moved_to_its_copy_is_not_freed(make_pool):
    def run(device, homes):
        torch.manual_seed(0)
        layer, given = torch.nn.Linear(4, 3).to(device), torch.randn(6, 4).to(device)
        layer(given).square().mean().backward()  # both executors run the layer, and keep copies of its weights
        djinn.synchronize()
        if device == REMOTE:
            homes += [session.home(storage_of(weight.remote.handle)) for weight in layer.parameters()]
        with torch.no_grad():  # not split, because it reads what it writes
            torch._foreach_add_([layer.bias, layer.weight], [layer.weight[:, 0], layer.bias[:, None]])
        return layer.bias.detach().cpu(), layer.weight.detach().cpu(), layer(given).detach().cpu()

    with make_pool("round_robin") as session:
        assert all(map(torch.allclose, run(REMOTE, homes := []), run("cpu", [])))
        assert set(homes) == {0, 1}


def test_lost_executor_ends_session(make_pool):
    with make_pool("round_robin", recover=False):
        value = torch.ones(3, device=REMOTE) + 1
        djinn.synchronize()
        kill(1)
        with pytest.raises(djinn.errors.SessionLost, match=r"djinn\.init"):
            for _ in range(20):
                value = (value * 2 + value.sum()).relu()
                value.tolist()
        djinn.init()
        assert (torch.ones(3, device=REMOTE) + 1).tolist() == [2, 2, 2]


@pytest.fixture
def unreachable_peers(monkeypatch):
    """Give executors addresses at which no executor listens, so that they cannot reach each other."""

    def nowhere(self, question, kind):
        reply = ask(self, question, kind)
        return PeerTicket(reply.ticket, ("tcp://127.0.0.1:1",)) if kind is PeerTicket else reply

    ask = Replies.ask
    monkeypatch.setattr(Replies, "ask", nowhere)


def test_transfer_without_peer_link_passes_client(make_pool, unreachable_peers, caplog):
    with make_pool("round_robin"):
        assert "values between them pass through this process" in caplog.text
        given = torch.arange(12.0).reshape(3, 4)
        ours = given.to(REMOTE)
        view = ours[1:]
        view.add_(ours[:2] * 2)
        expected = given.clone()
        expected[1:].add_(given[:2] * 2)
        assert torch.equal((ours @ ours.T + 1).relu().cpu(), (expected @ expected.T + 1).relu())
