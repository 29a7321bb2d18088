"""Ctrl-C at the moments that matter: it is raised at once, what it stops says so, and everything else is as it was."""

from __future__ import annotations

import signal
import sys
import threading
import time
import weakref

import pytest
import torch

import djinn
from djinn_client.runtime.planning import plan_maker
from djinn_client.runtime.sending import cancellation, uploads
from djinn_core.errors import ProgramStopped
from djinn_core.system.interrupts import interrupt_mask, raise_outside_torch, warn_without_lock
from djinn_core.wire.cancel_messages import CancelSubmissions
from tests.shared.executors import only_executor

DEVICE = "remote_accelerator:0"
SIDE = 500
LONG = 4000  # ops of several milliseconds each: a wait for the end of them gives a number, and no error


@pytest.fixture(autouse=True)
def interruptible():
    """Let SIGINT raise. A suite in a shell's background ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) in {raise_outside_torch, signal.default_int_handler}
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def executor(embedded):
    djinn.synchronize()
    return only_executor()


@pytest.fixture
def press_ctrl_c():
    """Return a function that presses Ctrl-C once the main thread waits. It returns the list of press times."""
    threads = []

    def press_ctrl_c(executor):
        pressed = []

        def press():
            while not executor.replies.pending:
                time.sleep(0.01)
            time.sleep(0.2)
            pressed.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threads.append(threading.Thread(target=press, daemon=True))
        threads[-1].start()
        return pressed

    yield press_ctrl_c
    for thread in threads:
        thread.join(60)


def long_program(ops=LONG):
    matrix = torch.full((SIDE, SIDE), 0.001, device=DEVICE)
    for _ in range(ops):
        matrix = matrix @ matrix
    return matrix.sum()


def test_ctrl_c_ends_wait_and_cancels_program(executor, press_ctrl_c):
    kept = torch.arange(4.0).to(DEVICE)
    total = long_program()
    pressed = press_ctrl_c(executor)
    with pytest.raises(KeyboardInterrupt):
        total.item()
    assert pressed
    assert str(torch.ones(2, device=DEVICE)).startswith("tensor([1., 1.]")
    with pytest.raises(ProgramStopped, match=r"Ctrl-C"):
        total.item()
    assert kept.tolist() == [0, 1, 2, 3]
    djinn.synchronize()


def test_second_ctrl_c_ends_wait_on_busy_executor(executor, press_ctrl_c, monkeypatch):
    monkeypatch.setattr(cancellation, "GRACE_SECONDS", 1000.0)  # as for a single op that takes long
    kept = torch.arange(4.0).to(DEVICE)
    total = long_program()
    for program in (total.item, lambda: print(torch.ones(2, device=DEVICE)), kept.sum().item):
        pressed = press_ctrl_c(executor)
        with pytest.raises(KeyboardInterrupt):
            program()
        assert pressed
    djinn.cancel()
    assert kept.sum().item() == 6
    with pytest.raises(ProgramStopped):
        total.item()


@pytest.mark.usefixtures("plans_all")
def test_recorded_ops_survive_interrupt(executor, monkeypatch):
    monkeypatch.setattr(cancellation, "GRACE_SECONDS", 1000.0)
    x = torch.ones(3, device=DEVICE)
    djinn.synchronize()
    for where, place in (
        ("make_ready", executor.submissions),
        ("plan_program", plan_maker),
        ("channel", executor.link),
    ):
        reached = getattr(place, where)

        def interrupt_once(*arguments, reached=reached, place=place, where=where, **named):
            monkeypatch.setattr(place, where, reached)
            signal.raise_signal(signal.SIGINT)
            return reached(*arguments, **named)

        class Interrupting:
            def __getattr__(self, name, reached=reached):
                monkeypatch.setattr(executor.link, "channel", reached)
                signal.raise_signal(signal.SIGINT)
                return getattr(reached, name)

        x.add_(1)
        doubled = x * (
            2.0 if where == "make_ready" else 3.0 if where == "plan_program" else 4.0
        )  # so that it is replanned
        monkeypatch.setattr(place, where, Interrupting() if where == "channel" else interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            (doubled.neg() if where == "plan_program" else doubled).sum().item()
        assert getattr(place, where) == reached, "it was interrupted there"
        factor = {"make_ready": 2, "plan_program": 3, "channel": 4}[where]
        assert doubled.tolist() == [factor * value for value in x.tolist()]
    assert x.tolist() == [4, 4, 4]


@pytest.mark.usefixtures("plans_all")
def test_planning_can_be_interrupted(executor, monkeypatch):
    plan, reached = plan_maker.plan_program, []

    def interrupt_planning(*arguments, **named):
        monkeypatch.setattr(plan_maker, "plan_program", plan)
        reached.append("began")
        signal.raise_signal(signal.SIGINT)
        reached.append("went on")
        return plan(*arguments, **named)

    x = torch.arange(5.0, device=DEVICE)
    djinn.synchronize()
    monkeypatch.setattr(plan_maker, "plan_program", interrupt_planning)
    y = x.atan().sinh().cosh().mul(7.25)
    with pytest.raises(KeyboardInterrupt):
        y.tolist()
    assert reached == ["began"]
    assert y.tolist() == pytest.approx(torch.arange(5.0).atan().sinh().cosh().mul(7.25).tolist())


def test_interrupted_upload_is_withdrawn(executor, monkeypatch):
    monkeypatch.setattr(uploads, "CHUNK", 1 << 16)
    sent, send_part = [], uploads.Uploader._send_part

    def interrupt_third_call(*arguments):
        sent.append(arguments)
        if len(sent) == 3:
            signal.raise_signal(signal.SIGINT)
        send_part(*arguments)

    kept, target = torch.arange(4.0).to(DEVICE), torch.empty(1 << 18, device=DEVICE)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(uploads.Uploader, "_send_part", interrupt_third_call)
        target.copy_(torch.ones(1 << 18))
    assert len(sent) == 3
    with pytest.raises(ProgramStopped, match="its upload was interrupted"):
        target.sum().item()
    target = torch.empty(1 << 18, device=DEVICE)
    target.copy_(torch.ones(1 << 18))
    assert target.sum().item() == 1 << 18
    assert kept.sum().item() == 6


def test_ctrl_c_ends_wait_for_sending_thread(executor, monkeypatch):
    send, main = executor.link.channel.send, threading.get_ident()
    sending, reads_again = threading.Event(), threading.Event()

    def send_slowly(frame):
        if threading.get_ident() != main:
            sending.set()
            reads_again.wait(30)
        send(frame)

    x = torch.arange(4.0).to(DEVICE)
    djinn.synchronize()
    monkeypatch.setattr(executor.link.channel, "send", send_slowly)
    other = threading.Thread(target=executor.link.send_message, args=(CancelSubmissions((1,)),), daemon=True)
    other.start()
    assert sending.wait(30)
    pressing = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    pressing.start()
    total = x.sum()
    with pytest.raises(KeyboardInterrupt):
        total.item()
    assert other.is_alive(), "the executor did not read yet"
    reads_again.set()
    other.join(30)
    pressing.join()
    assert total.item() == 6


def test_interrupted_request_does_not_shift_replies(executor, monkeypatch):
    receive = executor.link.channel.receive

    def interrupt_once(timeout=None):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        raise TimeoutError

    monkeypatch.setattr(executor.link.channel, "receive", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        torch.remote_accelerator.memory_allocated()
    assert executor.link.channel.receive == receive
    before = torch.remote_accelerator.memory_allocated()
    kept = torch.ones(1 << 18, device=DEVICE)
    djinn.synchronize()
    assert torch.remote_accelerator.memory_allocated() - before >= kept.nbytes, "and not the figures from before"


def test_cancel_ends_waits_of_threads(executor):
    found = {}

    def wait(name):
        total = long_program(LONG // 2)  # the second is recorded while the first one runs
        begun.release()
        try:
            found[name] = total.item()
        except ProgramStopped as stopped:
            found[name] = str(stopped)

    begun = threading.Semaphore(0)
    threads = {name: threading.Thread(target=wait, args=(name,)) for name in ("one", "other")}
    for thread in threads.values():
        thread.start()
        begun.acquire()
    while len({pending.thread for pending in list(executor.replies.pending.values())}) < 2:
        time.sleep(0.01)
    djinn.cancel(threads["one"])
    threads["one"].join()
    assert "cancel" in found["one"]
    assert threads["other"].is_alive(), "what the other thread has sent goes on"
    djinn.cancel()
    threads["other"].join()
    assert "cancel" in found["other"]
    assert torch.ones(3, device=DEVICE).sum().item() == 3.0


def test_cancel_without_work_does_nothing(executor):
    x = torch.ones(3, device=DEVICE)
    djinn.cancel()
    djinn.cancel(threading.current_thread())
    assert x.sum().item() == 3.0


def test_free_threaded_python_warns(monkeypatch, recwarn):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    warn_without_lock()
    assert not recwarn.list
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False)
    with pytest.warns(RuntimeWarning, match="PYTHON_GIL=1"):
        warn_without_lock()


def test_masked_interrupts_are_raised_at_checks():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupt_mask:
        with interrupt_mask:
            signal.raise_signal(signal.SIGINT)
            assert interrupt_mask.pending
        with interrupt_mask.uninterruptible:
            interrupt_mask.check()
            reached.append("in the whole")
        interrupt_mask.check()
        reached.append("after a check")
    with pytest.raises(KeyboardInterrupt), interrupt_mask:
        signal.raise_signal(signal.SIGINT)
        reached.append("before the end")
    with pytest.raises(KeyboardInterrupt), interrupt_mask, interrupt_mask.unmasked():
        signal.raise_signal(signal.SIGINT)
        reached.append("after what was let through")
    assert reached == ["in the whole", "before the end"]
    assert not interrupt_mask.pending


def test_custom_signal_handler_is_called(executor):
    calls = []
    previous = signal.signal(signal.SIGINT, lambda *_: calls.append("called"))
    try:
        with interrupt_mask:
            signal.raise_signal(signal.SIGINT)
            assert not calls
        assert calls == ["called"]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_finalizers_do_not_swallow_interrupts(executor):
    """Python drops exceptions of finalizers, so a tensor's finalizer must not run code that checks signals."""
    handle = executor.submissions.last_number
    x = torch.ones(3, device=DEVICE)
    for kind in (type(x), type(x.remote)):
        assert not hasattr(getattr(kind, "__del__", None), "__code__")
    del x
    djinn.synchronize()
    assert executor.submissions.last_number > handle


class _PressesWhenFreed:
    """An object whose finalizer presses Ctrl-C. Python ignores a finalizer's exceptions."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class _Key:
    """A key that presses Ctrl-C when a weak dictionary hashes it at its end."""


class _Presses(dict):
    def __delitem__(self, key):
        super().__delitem__(key)
        signal.raise_signal(signal.SIGINT)


def _freed_in_a_weak_dictionary():
    held, key = weakref.WeakKeyDictionary(), _Key()
    held[key] = 1
    held.data = _Presses(held.data)
    return held, [key]


def _freed_in_a_dictionary_of_dynamo():
    from torch._dynamo.utils import ExactWeakKeyDictionary

    held, key = ExactWeakKeyDictionary(), _Key()
    held[key] = 1
    held.values = type("Presses", (dict,), {"__contains__": lambda *_: signal.raise_signal(signal.SIGINT) or False})()
    return held, [key]


@pytest.mark.parametrize(
    "make",
    [lambda: (None, [_PressesWhenFreed()]), _freed_in_a_weak_dictionary, _freed_in_a_dictionary_of_dynamo],
)
def test_interrupt_in_finalizer_is_raised_afterwards(make):
    before = signal.signal(signal.SIGINT, raise_outside_torch)
    kept, last = make()
    try:
        with pytest.raises(KeyboardInterrupt):
            last.clear()
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before)
    del kept
