"""An open session: its executors, and the router that assigns parts of programs to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from djinn_client.hookspecs.routers import Executors, Router
from djinn_client.runtime.connecting.open import OpenSession
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_client.runtime.receiving.failures import Failures
from djinn_core.wire.weight_messages import RemoveWeights, SaveWeights

Connect = Callable[[OpenSession, Failures, int], ExecutorClient]  # creates the client of an executor with this number
LiveValues = Callable[[], Sequence[tuple[int, int]]]


class Session:
    """Executors that work for one program. Executors can join and leave, and the router may change.

    Attributes:
        executors: the executors by number.
        router: runs programs, and knows the executor of each value.
        failures: failures on the executors.
    """

    def __init__(self, connect: Connect, new_router: Callable[[], Router], live_values: LiveValues) -> None:
        """Create a session without executors.

        Args:
            connect: returns the client of an executor.
            new_router: returns a router for several executors.
            live_values: returns (handle, bytes of its storage) for each live value of the program.
        """
        self.executors: Executors[ExecutorClient] = Executors()
        self.failures = Failures()
        self.router = Router()
        self._connect, self._new_router, self._live_values = connect, new_router, live_values

    def join(self, opened: Sequence[OpenSession]) -> None:
        """Add executors with open sessions. The caller holds the sink's lock, or is the only owner of the session.

        Raises:
            ConfigurationError: no plugin offers the router for several executors, or a memory limit names an unknown
                device.
            SessionLost: an executor is gone. If it is a new executor, the session stays unchanged.
        """
        executors, router, before = self.executors, self.router, len(self.executors.members)
        is_alone = before + len(opened) == 1
        if not is_alone and not router.name:
            router = self._new_router()
        numbers: list[int] = []
        try:
            for number, member in enumerate(opened, before + 1):
                numbers.append(executors.enter(self._connect(member, self.failures, 0 if is_alone else number)))
            if router is self.router and before:
                router.join(numbers)
            elif before:
                executors.members[0].set_number(1)  # the only executor so far, number 0
                router.begin(executors, self._live_values())
            else:
                router.begin(executors)
        except BaseException:
            for number in numbers if before else ():
                executors.leave(number, executors.present[0])
            raise
        self.router = router

    @property
    def server(self) -> str:
        """The addresses in use."""
        return ", ".join(executor.server for executor in self.executors.current)

    @property
    def lost(self) -> str:
        """The reason why the session is lost or closed. Empty while it is open. One lost executor loses the session."""
        for executor in self.executors.current:
            if executor.link.lost:
                return executor.link.lost
        return ""

    @property
    def round_trip_seconds(self) -> float | None:
        """Return the longest network round trip to an executor in seconds, or None if unknown."""
        round_trips = [
            s for executor in self.executors.current if (s := executor.replies.round_trip_seconds) is not None
        ]
        return max(round_trips, default=None)

    def stop_after_interrupt(self) -> None:
        """Stop this thread's pending submissions after an interrupted wait, unless they are nearly done."""
        for executor in self.executors.current:
            executor.replies.cancellation.stop_after_interrupt()

    def cancel(self, thread: int | None = None) -> None:
        """Stop the pending submissions of a thread, by its identity, or of all threads. End their waits."""
        for executor in self.executors.current:
            executor.replies.cancellation.cancel(thread)

    @property
    def changes_files(self) -> bool:
        """True while a request to write or remove weights is unanswered."""
        return any(executor.replies.awaits(SaveWeights, RemoveWeights) for executor in self.executors.current)

    def close(self, *, finish: bool = False) -> None:
        """End the session. Its executors free its values. `finish`: executors first complete all earlier requests."""
        self.router.close()
        for executor in self.executors.current:
            executor.link.close(finish=finish)
