"""Ctrl-C between what is recorded and what is sent."""

from __future__ import annotations

import signal

import pytest
import torch

import djinn
from djinn_core.runtime import client


def test_an_interrupt_waits_until_what_was_recorded_is_sent(embedded, monkeypatch):
    x = torch.ones(3, device=embedded)
    djinn.synchronize()
    session = client._state.session
    run = session.run

    def interrupted_once(*arguments):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return run(*arguments)

    monkeypatch.setattr(session, "run", interrupted_once)
    x.add_(1)
    doubled = x * 2
    with pytest.raises(KeyboardInterrupt):
        djinn.synchronize()
    assert doubled.tolist() == [4, 4, 4]
    assert x.tolist() == [2, 2, 2]


def test_a_second_interrupt_does_not_wait(embedded, monkeypatch):
    x = torch.ones(3, device=embedded)
    djinn.synchronize()
    reached = []

    def impatient(*_):
        signal.raise_signal(signal.SIGINT)
        reached.append("interrupted once")
        signal.raise_signal(signal.SIGINT)
        reached.append("interrupted twice")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(client._state.session, "run", impatient)
        x.add(1).sum().item()
    assert reached == ["interrupted once"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
