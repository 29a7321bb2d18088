"""Cancellation of pending submissions: after Ctrl-C, a deadline or `djinn.cancel`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from djinn_client.runtime.executor_link import ExecutorLink
from djinn_client.runtime.sending.binding import PendingSubmission
from djinn_core.errors import ProgramStopped, TransportError
from djinn_core.hookspecs.transports import Frame
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.messages import encode

# Seconds between an interrupt and the stop message. A submission that ends in this time is not stopped.
GRACE_SECONDS = 0.2
log = get_logger("djinn.session")


class Cancellation:
    """Stop pending submissions, and record the submissions whose failures `synchronize()` ignores.

    Attributes:
        unobserved: numbers of submissions whose failures are raised only when a failed value is used.
        cancelled: numbers of submissions for which no thread may wait any more.
    """

    def __init__(self, link: ExecutorLink, pending: Mapping[int, PendingSubmission]) -> None:
        """Begin with the unanswered submissions `pending`, by number."""
        self._link = link
        self._pending = pending
        self.unobserved: set[int] = set()
        self.cancelled: set[int] = set()

    def stop_after_interrupt(self) -> None:
        """Stop this thread's pending submissions after an interrupted wait, unless they end within `GRACE_SECONDS`."""
        self.stop_waiting(GRACE_SECONDS)

    def stop_waiting(self, grace: float = 0.0) -> None:
        """Stop this thread's pending submissions that do not end within `grace` seconds."""
        thread = threading.get_ident()
        self._stop_submissions([n for n, p in list(self._pending.items()) if p.thread == thread], grace)

    def cancel(self, thread: int | None = None) -> None:
        """Stop the pending submissions of a thread, by its identity, or of all threads. End their waits."""
        numbers = [n for n, p in list(self._pending.items()) if thread is None or p.thread == thread]
        self.cancelled.update(numbers)
        self._stop_submissions(numbers)

    def mark_unobserved_after(self, number: int) -> None:
        """Raise failures of this thread's later pending submissions only when the program uses a failed value."""
        thread = threading.get_ident()
        self.unobserved.update([n for n, p in self._pending.items() if n > number and p.thread == thread])

    def _stop_submissions(self, numbers: Sequence[int], grace: float = 0.0) -> None:
        if numbers and not self._link.lost:
            self.unobserved.update(numbers)
            # On another thread, because a send may block for as long as the executor does not read.
            stop = tuple(numbers)[-limits.STOPS :]
            threading.Thread(target=self._stop, args=(stop, grace), name="djinn-stop", daemon=True).start()

    def _stop(self, numbers: tuple[int, ...], grace: float) -> None:
        if grace:
            time.sleep(grace)
            numbers = tuple([n for n in numbers if n in self._pending])
        try:
            if numbers:
                self._link.channel.send(Frame(encode(CancelSubmissions(numbers))))
        except TransportError as error:
            log.debug("the request to stop submissions could not be sent to the executor", reason=str(error))


def cancelled_error(server: str) -> ProgramStopped:
    """Return the error for a wait for `server` that `djinn.cancel` ended."""
    return ProgramStopped(
        f"djinn.cancel() was called while this thread waited for {server}. The executor stops the cancelled programs between "
        "two ops. Values that they did not compute or write raise ProgramStopped; other values stay usable"
    )
