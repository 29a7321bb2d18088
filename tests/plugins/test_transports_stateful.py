"""The state machine for transports finds transports that lose, reorder, leak or raise the wrong error."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest
from hypothesis.errors import Flaky

from djinn.testing import run_transport_states, transports_stateful
from djinn_core.errors import TransportError
from djinn_core.hookspecs.session_channel import PlainChannel
from djinn_core.hookspecs.transports import Connection, Frame, Limits, Listener
from djinn_core.protocol.local import LocalTransport


class LosingConnection(PlainChannel):
    """A connection that loses frames from 40,000 bytes up after the first frame."""

    sends = 0

    def send(self, frame: Frame) -> None:
        self.sends += 1
        if self.sends < 2 or sum(map(len, frame.body)) < 40_000:
            super().send(frame)


class ReorderingConnection(PlainChannel):
    """A connection that delivers the newer of two frames first."""

    def __init__(self, inner: Connection) -> None:
        super().__init__(inner)
        self.ahead: list[Frame] = []

    def receive(self, timeout: float | None = None) -> Frame:
        if not self.ahead:
            self.ahead.append(super().receive(timeout))
            try:
                self.ahead.append(super().receive(0.0))
            except (TimeoutError, TransportError):
                return self.ahead.pop()
        return self.ahead.pop()


class TruncatingConnection(PlainChannel):
    """A connection that delays the newest frame and loses it at close."""

    held_back: Frame | None = None

    def send(self, frame: Frame) -> None:
        before, self.held_back = self.held_back, frame if len(frame.head) == 1000 else None
        for one in (before, frame if self.held_back is None else None):
            if one is not None:
                super().send(one)


class RawErrorConnection(PlainChannel):
    """A connection that raises the socket's error once the peer has closed."""

    def receive(self, timeout: float | None = None) -> Frame:
        try:
            return super().receive(timeout)
        except TransportError as error:
            raise ConnectionResetError(str(error)) from None


class LeakingConnection(PlainChannel):
    """A connection that opens a descriptor and never closes it."""

    def close(self) -> None:
        leaked.append(os.open(os.devnull, os.O_RDONLY))
        super().close()


class BorrowingConnection(PlainChannel):
    """A connection that sends a small frame with the next one, from the caller's buffers."""

    later: Frame | None = None

    def send(self, frame: Frame) -> None:
        before, self.later = self.later, None
        if before is not None:
            super().send(before)
        if before is None and frame.body:
            self.later = frame
        else:
            super().send(frame)


class FaultyTransport(LocalTransport):
    """The built-in transport with a faulty wrapper around each connection."""

    def __init__(self, fault: Callable[[Connection], Connection]) -> None:
        self.fault = fault

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        return self.fault(super().connect(url, limits, timeout))

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], None]) -> Listener:
        return super().listen(url, limits, lambda connection: accept(self.fault(connection)))


leaked: list[int] = []


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "fault",
    [
        LosingConnection,
        ReorderingConnection,
        TruncatingConnection,
        RawErrorConnection,
        LeakingConnection,
        BorrowingConnection,
    ],
)
def test_state_machine_catches_faulty_transport(fault: type[PlainChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports_stateful, "PATIENCE", 0.5)
    monkeypatch.setattr(transports_stateful, "eventually", lambda condition: condition())
    message = "descriptors are open that were not before" if fault is LeakingConnection else "TransportStateMachine"
    try:
        with pytest.raises(
            (Exception, pytest.fail.Exception)
        ) as caught:  # Hypothesis has one for faults that do not come again
            run_transport_states(
                FaultyTransport(fault), "unix://", examples=10 if fault is LeakingConnection else 300, shrink=False
            )
        found = message in "\n".join(traceback.format_exception(caught.value))
        assert found or (fault is not LeakingConnection and isinstance(caught.value, Flaky))
    finally:
        for descriptor in leaked:
            os.close(descriptor)
        leaked.clear()


def test_state_machine_passes_correct_transport() -> None:
    run_transport_states(FaultyTransport(PlainChannel), "unix://", examples=10)
