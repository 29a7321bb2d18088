"""Small results that are fetched one after the other come in one round trip when a program runs again, and are always current."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from configured import configured
from long_forms import long_or
from simulated_marks import own_executors

import djinn
from djinn_client.interception.recording.recorder import Recorder

REMOTE = "remote_accelerator:0"


@pytest.fixture
def device(embedded):
    return embedded


def round_trips(function, times=4):
    """Return the number of round trips of the last of `times` calls."""
    for _ in range(times):
        djinn.reset_stats()
        function()
    return djinn.stats()["round_trips"]


def test_items_of_list_are_fetched_in_one_round_trip(device):
    given = torch.arange(8.0, device=device)
    offset = 0

    def run():
        nonlocal offset
        offset += 1
        results = [(given * i + offset).sum() for i in range(50)]
        assert [one.item() for one in results] == [28.0 * i + 8 * offset for i in range(50)]

    assert round_trips(run) == 1


def test_prints_copies_and_conditions_are_predicted(device):
    given = torch.arange(4.0, device=device)

    def run():
        first, second, third = given + 1, given * 2, given.max()
        assert "2., 3." in repr(first)
        assert second.cpu().tolist() == [0, 2, 4, 6]
        assert second.tolist() == [0, 2, 4, 6]
        assert bool(third > 2) is True

    assert round_trips(run) == 2  # the comparison is a program of its own


def test_repeated_read_of_number_is_predicted(device):
    given = torch.arange(4.0, device=device)

    def run():
        total = given.sum()
        assert [total.item() for _ in range(3)] == [6, 6, 6]
        twice = total * 2
        assert (total.item(), twice.item()) == (6, 12)
        fetched = total.cpu()
        fetched += 1
        assert total.item() == 6
        total.add_(1)
        assert (total.item(), twice.item()) == (7, 12)

    assert round_trips(run) == 3  # one for each program


def test_large_results_are_not_prefetched(device):
    given = torch.ones(4, device=device)
    large = torch.ones(5000, device=device)

    def run():
        small, much = given + 1, large + 1
        assert small[0].item() == 2
        assert much.cpu().sum().item() == 10_000

    djinn.reset_stats()
    round_trips(run)
    assert djinn.stats()["bytes_received"] < 3 * large.nbytes / 2


def test_write_invalidates_prediction(device):
    given = torch.ones(2, 2, device=device)

    def run(write):
        values = [given * i for i in range(6)]
        assert values[0].sum().item() == 0
        if write:
            values[3].add_(1)
            values[4].t()[0, 1] = 7
            values[5].squeeze_().view(-1)[::2].zero_()
        return [value.tolist() for value in values[1:]]

    for write in (False, False, False, True, False, True):
        found = run(write)
        expected = [[[float(i)] * 2] * 2 for i in range(1, 6)]
        if write:
            expected[2:] = [[[4.0] * 2] * 2, [[4.0, 4.0], [7.0, 4.0]], [[0.0, 5.0]] * 2]
        assert found == expected


def test_sent_write_invalidates_prediction(device):
    given = torch.ones(2, device=device)

    def run(write):
        values = [given * i for i in range(4)]
        assert values[0].tolist() == [0, 0]
        if write:
            torch._foreach_add_(values, 1)
            djinn.synchronize()
        return [value.tolist() for value in values]

    for write in (False, False, False, True, False):
        assert run(write) == [[float(i + write)] * 2 for i in range(4)]


WRITES = {
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "as_strided_": lambda t: t.as_strided_((2,), (1,)),
    "resize_": lambda t: t.resize_(3),
    "set_": lambda t: t.set_(torch.ones(2, device=t.device)),
    "set_ to its own storage": lambda t: t.set_(t.untyped_storage(), 1, (2,), (1,)),
    "data": lambda t: setattr(t, "data", torch.ones(2, device=t.device)),
    "swap": lambda t: torch.utils.swap_tensors(t, torch.ones(2, device=t.device)),
    "a view": lambda t: t.detach()[0].fill_(5),
    "storage": lambda t: t.untyped_storage().fill_(0),
    "storage of another": lambda t: t.untyped_storage().copy_(torch.ones(6).to(t.device).untyped_storage()),
    "out": lambda t: torch.add(t, 1, out=t),
    "from the CPU": lambda t: t.copy_(torch.ones(3, 2)),
    "item": lambda t: t.__setitem__(0, 7),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("sent", [False, True])
def test_all_kinds_of_writes_invalidate_prediction(device, name, sent):
    def run(where):
        tensor = torch.arange(6.0, device=where).view(3, 2).clone()
        assert tensor.tolist() == tensor.tolist() == [[0, 1], [2, 3], [4, 5]]
        WRITES[name](tensor)
        if sent:
            djinn.synchronize()
        return tensor.tolist(), tensor.shape

    assert run(device) == run("cpu")


def test_write_of_other_thread_invalidates_prediction(device):
    given = torch.ones(2, device=device)

    def run():
        first, second = given * 2, given * 3
        assert first.tolist() == [2, 2]
        other = threading.Thread(target=second.add_, args=(1,))
        other.start(), other.join()
        assert second.tolist() == [4, 4]

    for _ in range(4):
        run()


def test_unsent_write_of_other_thread_invalidates_prediction(device):
    given = torch.ones(2, device=device)

    def run(written):
        values = [given * i for i in range(4)]
        other.submit(values[written].add_, 1).result()  # sends the program before, and keeps its own
        assert (given + 1).tolist() == [2, 2]
        return [value.tolist() for value in values[2:]]

    with ThreadPoolExecutor(1) as other:
        for written in (1, 1, 1, 3, 1, 2):
            assert run(written) == [[float(i + (i == written))] * 2 for i in (2, 3)]


def test_fetched_values_are_shared_by_threads(device):
    total = torch.arange(4.0, device=device).sum()
    assert total.item() == 6
    djinn.reset_stats()
    found = []
    for change in (False, True):
        if change:
            total.add_(1)
        other = threading.Thread(target=lambda: found.append(total.item()))
        other.start(), other.join()
    assert found == [6, 7]
    assert djinn.stats()["round_trips"] == 1


def test_write_during_fetch_invalidates_fetched_value(device, monkeypatch):
    total, plain = torch.arange(4.0, device=device).sum(), Recorder.ask_unseen

    def written_after(*args):
        reply = plain(*args)
        other = threading.Thread(target=total.add_, args=(1,))
        other.start(), other.join()
        return reply

    monkeypatch.setattr(Recorder, "ask_unseen", written_after)
    assert total.item() == 6
    monkeypatch.undo()
    assert total.item() == 7


def test_prediction_tolerates_fewer_results(device):
    given = torch.ones(2, device=device)

    def run(count):
        values = [given * i for i in range(20)]
        del values[count:]
        gc.collect(1)  # of what is young: all objects of the suite take a second
        assert [value.sum().item() for value in values] == [2 * i for i in range(count)]

    for count in (20, 20, 20, 5, 20, 20, 1, 7):
        run(count)


def test_failed_prefetch_raises_at_read(device):
    given, good = torch.ones(2, device=device), torch.tensor([0], device=device)

    def run(index):
        first, second, third = given * 2, given.index_select(0, index), given * 3
        assert first.sum().item() == 4
        try:
            found = second.item()
        except (IndexError, RuntimeError):
            found = None
        return found, third.sum().item()

    for _ in range(3):
        assert run(good) == (1, 6)
    for index, expected in ((torch.tensor([9], device=device), None), (good, 1), (good, 1)):
        assert run(index) == (expected, 6)


@pytest.mark.parametrize("seed", range(long_or(2, 5)))
def test_random_programs_equal_cpu(device, seed):
    chance = random.Random(seed)
    scripts = [[chance.randrange(6) for _ in range(chance.randrange(2, 12))] for _ in range(3)]

    def run(where, script, start):
        chance = random.Random(start // 3)  # so that some runs are repeated and others are not
        values, found = [torch.full((2, 3), float(start), device=where)], []
        for step in script:
            values += [values[-1] * 2 + i for i in range(step)]
            one = chance.choice(values)
            if step == 4:
                one.add_(1)
            elif step == 5:
                one.view(-1)[1:3].mul_(2)
            found += [value.sum().item() for value in values[-step:]]
            if step == 1:
                del values[: len(values) // 2]
            if step == 3:
                found.append(one.tolist())
        return found

    for start in range(9):
        for script in scripts:
            assert run(device, script, start) == run("cpu", script, start)


@own_executors
def test_prediction_works_over_two_executors():
    with configured(executors=2, threads=1, placement_policy="round_robin"):
        given = torch.ones(4, device=REMOTE)

        def run():
            results = [(given * i).sum() for i in range(20)]
            assert [one.item() for one in results] == [4.0 * i for i in range(20)]

        assert round_trips(run) <= 2  # one for each executor
