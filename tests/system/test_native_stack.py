"""C++ that stands between a function and the Python code that it was called from: told without names of the interpreter's functions."""

from __future__ import annotations

import functools
import signal
import threading

import pytest
import torch

from djinn_core.system import native_stack
from djinn_core.system.interrupts import raise_outside_torch


def call_through_c(function):
    """Call a Python function through C."""
    return functools.reduce(lambda _, called: called(), (None, function))


@pytest.fixture
def call_through_torch():
    """Return a function that PyTorch's C++ calls, and its argument."""

    def call(function):
        found = []
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: found.append(function()))
        x.sum().backward()
        return found[0]

    return call


def test_stack_of_function_called_by_cpp(call_through_torch):
    assert call_through_torch(lambda: native_stack.is_on_stack(b"libtorch"))


def test_stack_of_function_called_through_c(call_through_torch):
    """A signal handler may run in Python code that PyTorch called."""
    assert not call_through_torch(lambda: call_through_c(lambda: native_stack.is_on_stack(b"libtorch")))
    assert not call_through_c(lambda: native_stack.is_on_stack(b"libtorch"))
    assert not native_stack.is_on_stack(b"libtorch")


def test_each_entry_from_c_is_seen_once():
    entry = native_stack._entry
    assert entry is not None

    def entries():
        return sum(native_stack._function_at(address) == entry for address in native_stack._addresses())

    def called_by_python():
        return entries()

    found = []

    def run():  # in a thread: the stack of a test is longer than what is looked at
        found.append(entries())
        found.append(called_by_python() - found[0])
        found.append(call_through_c(entries) - found[0])
        found.append(call_through_c(lambda: call_through_c(entries)) - found[0])
        found.append(int([*sorted([7], key=lambda _: found.append(entries() - found[0]))] == [7]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[1:] == [0, 1, 2, 1, 1]


def test_native_stack_is_empty_on_unsupported_platform(monkeypatch, call_through_torch):
    monkeypatch.setattr(native_stack, "_entry", None)
    assert not call_through_torch(lambda: native_stack.is_on_stack(b"libtorch"))


def test_ctrl_c_in_hook_raises_at_once():
    before = signal.signal(signal.SIGINT, raise_outside_torch)
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            x.sum().backward()
    finally:
        signal.signal(signal.SIGINT, before)
