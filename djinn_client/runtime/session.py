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
    """Executors that work for one program.

    The object stays the same while executors join and leave; the router may change.

    Attributes:
        executors: the executors by number.
        router: runs programs, and knows the executor of each value.
    """

    def __init__(self, connect: Connect, several: Callable[[], Router], held: LiveValues) -> None:
        """Create a session without executors.

        Args:
            connect: creates the client of an executor.
            several: returns the router for several executors.
            held: returns the handle of each value that the program holds, and the bytes of its storage.
        """
        self.executors: Executors[ExecutorClient] = Executors()
        self.failures = Failures()
        self.router = Router()
        self._connect, self._several, self._held = connect, several, held

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
            router = self._several()
        numbers: list[int] = []
        try:
            for number, one in enumerate(opened, before + 1):
                numbers.append(executors.enter(self._connect(one, self.failures, 0 if is_alone else number)))
            if router is self.router and before:
                router.join(numbers)
            elif before:
                executors.members[0].count_as(1)  # the only executor so far, number 0
                router.begin(executors, self._held())
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
        """The reason why the session is lost or closed; empty while it is open.

        The loss of one executor loses the session.
        """
        for executor in self.executors.current:
            if executor.link.lost:
                return executor.link.lost
        return ""

    @property
    def round_trip_seconds(self) -> float | None:
        """Return the longest network round trip to an executor in seconds; None if unknown."""
        round_trips = [
            s for executor in self.executors.current if (s := executor.replies.round_trip_seconds) is not None
        ]
        return max(round_trips, default=None)

    def interrupted(self) -> None:
        """Stop this thread's pending submissions after an interrupted wait, unless they are nearly done."""
        for executor in self.executors.current:
            executor.replies.cancellation.interrupted()

    def cancel(self, thread: int | None = None) -> None:
        """Stop the pending submissions of a thread, or of all threads, and their waits."""
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
