"""Uploads to a server that keeps weights: offered, sent in the background of what goes on, and left in order by interrupts."""

from __future__ import annotations

import pytest
import torch

from djinn_core.runtime import client, offers

SIZE = 3 << 20


class Interrupted:
    """A connection on which Ctrl-C is pressed while the client waits for the `at`-th time."""

    def __init__(self, connection, at):
        self._connection = connection
        self._left = at

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def receive(self, timeout=None):
        self._left -= 1
        if self._left == -1:
            raise KeyboardInterrupt
        return self._connection.receive(timeout)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_an_interrupted_upload_is_what_it_was_then(keeping, monkeypatch, at):
    monkeypatch.setattr(offers, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(offers, "CHUNK", 1 << 20)
    session = client._state.session
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    expected = source.clone()
    target = torch.empty(SIZE, dtype=torch.uint8, device="remote_accelerator:0")
    connection = session.connection
    monkeypatch.setattr(session, "connection", Interrupted(connection, at))
    with pytest.raises(KeyboardInterrupt):
        target.copy_(source)
    monkeypatch.setattr(session, "connection", connection)
    source.zero_()
    assert torch.equal(target.cpu(), expected)
    assert not session._uploads.unanswered
