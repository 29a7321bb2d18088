"""Threads record on their own; a value that goes from one to another is the same there."""

from __future__ import annotations

import queue
import random
import sys
import threading

import pytest
import torch

import djinn
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import current, recorders
from djinn_client.interception.recording.replay import reissue
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tap import Tap, taps
from djinn_client.interception.tensors.lazy_tensor import fresh
from djinn_integrations.dynamo.recorded_call import record_call


@pytest.fixture(autouse=True)
def _frequent_switches():
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=[16, 4096])
def checkpoint(request, monkeypatch):
    monkeypatch.setattr(port, "checkpoint_instructions", request.param)
    recorders.limit_programs()


def run_in_thread(function, *arguments):
    results = []

    def run():
        try:
            results.append(function(*arguments))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert results, "the thread hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def test_other_thread_uses_unsent_value(embedded):
    made = torch.arange(4.0, device=embedded) + 1

    def use():
        return (made * 2).tolist()

    assert run_in_thread(use) == [2, 4, 6, 8]


def test_other_thread_uses_unsent_view(embedded):
    base = torch.arange(6.0).to(embedded)
    view = base.view(2, 3)
    found = []
    run_in_thread(lambda: found.append(view.tolist()))
    assert found == [[[0, 1, 2], [3, 4, 5]]]


def test_other_thread_writes_after_unsent_read(embedded):
    x = torch.zeros(3, device=embedded)
    djinn.synchronize()
    before = x + 0
    run_in_thread(x.add_, 1)
    after = x + 0
    assert (before.tolist(), after.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_unsent_write_of_other_thread_is_seen(embedded):
    x = torch.zeros(3, device=embedded)
    djinn.synchronize()
    run_in_thread(x.add_, 1)  # recorded by a thread that has ended, and never sent by it
    assert x.tolist() == [1, 1, 1]


def test_other_thread_frees_value_with_unsent_use(embedded):
    holder = [torch.ones(3, device=embedded)]
    djinn.synchronize()
    doubled = holder[0] * 2

    def drop():
        holder.clear()
        torch.zeros(2, device=embedded).sum().item()  # sends the frees that have gathered

    run_in_thread(drop)
    assert doubled.tolist() == [2, 2, 2]


def test_unsent_values_of_ended_thread_are_freed(embedded):
    run_in_thread(lambda: torch.zeros(3, device=embedded).add_(1).__len__())
    for _ in range(2):
        torch.zeros(2, device=embedded).sum().item()
    assert recorders.waiting == 0
    assert not any(recorder.ended for recorder in recorders.all())


def test_concurrent_views_have_different_handles(embedded):
    storage = torch.ones(4, device=embedded).remote.storage
    meta = torch.ones(4, device=embedded).remote.meta
    found = []

    def make():
        found.extend([fresh(meta, storage).remote.handle for _ in range(2000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 8000


def before_next_append(function):
    """Call `function` in another thread just before this one appends its next entry, which cannot be interrupted."""
    mine = current()

    class OneShotTap(Tap):
        def recording(self, *_):
            if current() is mine:
                taps.remove(self)
                run_in_thread(function)

    taps.add(OneShotTap())


def test_write_sends_readers_before_freeing_value(embedded):
    x = torch.zeros(2, 3, device=embedded)
    views = [x[0], x[1]]
    djinn.synchronize()
    read = []
    for view in views:
        run_in_thread(lambda view=view: read.append(view + 1))
    del view
    views.clear()
    x.add_(1)
    assert [one.tolist() for one in read] == [[1, 1, 1], [1, 1, 1]]


def record_unsent_in_thread(program):
    """Record a captured program again in a thread, unsent. Return a function that fetches its last result there."""
    recorded, fetched = threading.Event(), threading.Event()
    results = []

    def run():
        made = reissue(program, range(len(program)), {}, {})
        recorded.set()
        fetched.wait(60)
        results.append([*made.values()][-1].tolist() if made else None)

    thread = threading.Thread(target=run)
    thread.start()
    assert recorded.wait(60)

    def fetch():
        fetched.set()
        thread.join(60)
        return results[0]

    return fetch


def test_borrowed_write_is_seen_by_other_threads(embedded):
    x = torch.zeros(3, device=embedded)
    with djinn.capture() as captured:
        x.add_(1)
    assert x.tolist() == [1, 1, 1]
    fetch = record_unsent_in_thread(captured.program)
    assert x.tolist() == [2, 2, 2]
    fetch()
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("kept", [True, False])
def test_borrowed_read_precedes_later_writes(embedded, kept):
    x = torch.ones(3, device=embedded)
    with djinn.capture() as captured:
        made = x * 2
    program = captured.program
    del captured, made
    djinn.synchronize()
    fetch = record_unsent_in_thread(program)
    if kept:
        assert x.add_(10).tolist() == [11, 11, 11]
    else:
        del x
        torch.ones(3, device=embedded).sum().item()
    assert fetch() == [2, 2, 2]


@pytest.mark.parametrize(
    "other", [lambda x: x + 0, lambda x: x[1:], lambda x: x[1:].add_(1)], ids=["read", "view", "write"]
)
def test_view_is_sent_before_other_thread_uses_it(embedded, other):
    x = torch.zeros(2, 3, device=embedded)
    djinn.synchronize()
    kept = []
    before_next_append(lambda: kept.append(other(x)))
    view = x[0]

    def use():
        return (view + 1).tolist()

    assert run_in_thread(use) == [1, 1, 1]


def test_views_made_concurrently_are_sent_before_use(embedded):
    x = torch.zeros(2, 3, device=embedded)
    djinn.synchronize()
    made, begin, end = [], threading.Event(), threading.Event()

    def make():
        made.append(x[1])
        begin.set()
        end.wait(300)

    thread = threading.Thread(target=make)

    def start():
        thread.start()
        assert begin.wait(300)

    before_next_append(start)
    made.append(x[0])
    assert [run_in_thread(lambda view=view: (view + 1).tolist()) for view in made] == [[1, 1, 1], [1, 1, 1]]
    end.set()
    thread.join()


def test_write_is_seen_by_thread_reading_view(embedded):
    x = torch.zeros(2, 3, device=embedded)
    djinn.synchronize()
    first, second = x[0], x[1]
    djinn.synchronize()
    begin, done, seen = queue.Queue(), threading.Event(), []

    def reader():
        begin.get(timeout=300)
        seen.append(second + 0)
        done.set()
        begin.get(timeout=300)
        seen.append(first.tolist())

    def read():
        begin.put(None)
        assert done.wait(300)

    thread = threading.Thread(target=reader)
    thread.start()
    before_next_append(read)
    first.add_(1)
    begin.put(None)
    thread.join(300)
    assert seen[1] == [1, 1, 1]


def test_read_beside_write_precedes_later_writes(embedded):
    x = torch.zeros(2, 3, device=embedded)
    first, second = x[0], x[1]
    djinn.synchronize()
    before_next_append(lambda: second.add_(1))
    before = first + 0
    run_in_thread(lambda: first.add_(1).tolist())
    assert before.tolist() == [0, 0, 0]


def test_recorded_call_constant_outlives_use_in_threads(embedded):
    _, call = record_call(lambda t: [t + torch.tensor([1.0, 2.0]).to(embedded)], [torch.ones(2, device=embedded)])
    x = torch.ones(2, device=embedded)
    djinn.synchronize()
    made = run_in_thread(call.record, [x])
    del call
    torch.zeros(2, device=embedded).sum().item()  # sends the frees that have gathered
    assert made[0].tolist() == [2, 3]


def test_concurrently_dropped_views_keep_values(embedded):
    def multiply(x, made):
        made.append(x @ x.mT)

    for _ in range(60):
        x, made = torch.ones(3, 3, device=embedded), []
        threads = [threading.Thread(target=multiply, args=(x, made)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        run_in_thread(x.add_, 1)
        assert [one[0, 0].item() for one in made] == [3, 3, 3]


def test_last_op_is_sent_if_program_is_taken(embedded, monkeypatch):
    x, made = torch.ones(3, device=embedded), []
    begun, go_on = threading.Event(), threading.Event()

    def work():
        made.append(x + 1)
        begun.set()
        assert go_on.wait(60)
        made.append(x + 2)

    thread = threading.Thread(target=work)
    plain = ops.take

    def take(*arguments):
        taken = plain(*arguments)
        go_on.set()
        thread.join(60)
        return taken

    djinn.synchronize()
    thread.start()
    assert begun.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "take", take)
        assert made[0].tolist() == [2, 2, 2]
    current().flush()
    torch.ones(1, device=embedded).tolist()
    assert made[1].tolist() == [3, 3, 3]


def test_tensors_passed_between_threads_keep_values(embedded, checkpoint):
    torch.manual_seed(0)
    shared = torch.randn(4, 4)
    remote_shared = shared.to(embedded)
    bag, errors = queue.Queue(), []
    for i in range(6):
        bag.put((torch.full((4, 4), float(i)), torch.full((4, 4), float(i), device=embedded)))

    def exchange_tensors(seed):
        rng = random.Random(seed)
        try:
            for _ in range(60):
                local, remote = bag.get(timeout=300)
                bag.put(step(rng, local, remote))
        except BaseException as error:
            errors.append(error)

    def step(rng, local, remote):
        kind = rng.randrange(6)
        if kind == 0:
            local.add_(1), remote.add_(1)
        elif kind == 1:
            local, remote = local @ shared * 0.1, remote @ remote_shared * 0.1
        elif kind == 2:
            local[1:3].mul_(0.5), remote[1:3].mul_(0.5)
        elif kind == 3:
            local, remote = local.t().contiguous(), remote.t().contiguous()
        elif kind == 4:
            local, remote = local + shared.t()[0], remote + remote_shared.t()[0]
        else:
            torch.testing.assert_close(remote.cpu(), local)
        return local, remote

    threads = [threading.Thread(target=exchange_tensors, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors, errors[0]
    while not bag.empty():
        local, remote = bag.get()
        torch.testing.assert_close(remote.cpu(), local)


def test_capture_is_thread_local(embedded):
    inside, outside = threading.Event(), threading.Event()
    seen = []

    def other():
        inside.wait(300)
        seen.append(djinn.compat.is_capturing())
        seen.append(torch.ones(2).device.type)
        outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with djinn.capture() as captured:
        x = torch.ones(2)
        inside.set()
        outside.wait(300)
        y = x + 1
    thread.join()
    assert seen == [False, "cpu"]
    assert [node.op for node in captured.graph.nodes][-1] == "aten::add.Tensor"
    assert y.tolist() == [2, 2]


def test_readers_of_shared_weights_are_bounded(embedded):
    weight = torch.ones(4, device=embedded)
    for _ in range(30):
        assert run_in_thread(lambda: (weight * 2).sum().item()) == 8
    assert len(recorders.all()) <= 3


def test_only_writes_flush_other_threads(embedded):
    """A read of a shared tensor sends no other thread's program. A write between reads does."""
    steps, shared = 12, torch.ones(4, device=embedded)
    assert shared.sum().item() == 4

    def submissions(write):
        turns, results = [threading.Semaphore(1), threading.Semaphore(0)], [None, None]

        def work(own):
            for step in range(steps):
                turns[own].acquire()
                results[own] = shared * 2 + (results[own] if step else 0)
                if write and own:
                    shared.mul_(1)
                turns[1 - own].release()
            results[own] = results[own].tolist()

        threads = [threading.Thread(target=work, args=(own,)) for own in (0, 1)]
        before = djinn.stats()["submissions"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert results == [[2.0 * steps] * 4] * 2
        return djinn.stats()["submissions"] - before

    assert submissions(write=False) == 2
    assert submissions(write=True) > steps


def test_frees_waiting_for_idle_thread_are_bounded(embedded, monkeypatch):
    monkeypatch.setattr("djinn_client.interception.recording.recorder.WAITING_LIMIT", 50)
    release, kept = threading.Event(), threading.Event()
    bag = []

    def idle():
        bag.extend([torch.ones(2, device=embedded) for _ in range(200)])
        kept.set()
        release.wait(300)

    thread = threading.Thread(target=idle)
    thread.start()
    kept.wait(300)
    bag.clear()  # their definitions are unsent, in a thread that does nothing any more
    for _ in range(3):
        torch.zeros(1, device=embedded).item()
    assert recorders.waiting == 0
    release.set()
    thread.join()
