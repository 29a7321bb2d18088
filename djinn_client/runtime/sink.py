"""The sink of this process: passes interception's requests to the open session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from djinn_client.hookspecs.routers import PendingReply
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.context import ClientContext
from djinn_client.runtime.planning.session_planner import load_plugins
from djinn_client.runtime.session import Session
from djinn_client.sink import Facts, M, Sink, Submission, SubmissionReply
from djinn_core.errors import SessionLost
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.system.interrupts import InterruptibleLock
from djinn_core.wire.message_base import Message


class ClientSink(Sink):
    """The sink that passes programs to the open session of a context."""

    facts: Facts = port

    def __init__(self, context: ClientContext, begin: Callable[[], object]) -> None:
        """Create a sink. `begin`: function that begins a session."""
        self._context = context
        self._begin = begin

    @property
    def lock(self) -> InterruptibleLock:  # type: ignore[override] # looked up each time: a forked child has a new one
        """Lock of the session's submissions."""
        return port.lock

    def open(self) -> None:
        """Begin a session as `Sink.open`. Load plugins that planning has requested."""
        if self._context.session is None or port.forked:
            if port.lock._is_owned():  # type: ignore[attr-defined] # noqa: SLF001 - the documented order of the locks
                raise SessionLost("the session has ended")
            self._begin()
        if self._context.kinds_to_load and not port.lock._is_owned():  # type: ignore[attr-defined] # noqa: SLF001 - the same
            load_plugins(self._context)

    def _session(self) -> Session:
        session = self._context.session
        while session is None:
            self.open()
            session = self._context.session
        return session

    def submit(self, submission: Submission) -> PendingReply:
        """Submit a program to the session's router."""
        return self._session().router.submit(submission)

    def wait(self, ticket: PendingReply) -> SubmissionReply:
        """Wait for the requested values of a submission: one round trip."""
        return ticket.wait()

    def is_there(self, ticket: PendingReply) -> bool:
        """Return True if `wait` would not block. This reads replies that have arrived, and never blocks."""
        return ticket.is_there()

    def abandon(self, ticket: PendingReply | None = None, *, later: bool = False) -> None:
        """Abandon requested values, as `Sink.abandon`."""
        if ticket is None:
            if (session := self._context.session) is not None:
                session.stop_after_interrupt()
        elif later:
            ticket.mark_unobserved()
        else:
            ticket.discard()

    def upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int = 0) -> None:
        """Upload `source` as the value `handle` of a logical device, as `Sink.upload`."""
        self._session().router.upload(handle, source, device)

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Announce the CPU tensors that will be uploaded next, as `Sink.expect`."""
        self._session().router.expect(tensors)

    def ask(self, message: Message, kind: type[M], device: int = 0) -> M:
        """Send a message about a logical device, and return the reply, as `Sink.ask`."""
        return self._session().router.ask(message, kind, device)
