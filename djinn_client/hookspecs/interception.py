"""Interception: records the ops of the user's program, and passes programs to the runtime through a `Sink`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from djinn_client.sink import Sink, Submission, SubmissionReply, Ticket
from djinn_core.hookspecs import hookspec
from djinn_core.ir.program import Call, Program


class Interception(ABC):
    """Record the ops of the user's program on a remote device, and pass programs to a sink.

    Programs are values of `djinn_core.ir`. The client and the interception itself call `send`, `run` and `synchronize`.

    Attributes:
        name: unique among interceptions.
        sink: receives the programs; set by `begin`.
    """

    name: str

    def begin(self, sink: Sink) -> None:
        """Register the device with PyTorch, and begin to record.

        Called before the first session, and again when settings change.
        """
        self.sink = sink

    @abstractmethod
    def take(self, thread: int | None = None) -> Sequence[Submission]:
        """Return the recorded submissions of one thread, or of all threads.

        The caller submits them in order before it releases the sink's lock.
        """

    def learn(self, call: Call, result: int, stride: tuple[int, ...]) -> None:  # noqa: B027 - not needed by all
        """Predict `stride` for the result number `result` of calls like `call` from now on.

        An executor has found the old prediction wrong.
        """

    def reconsider(self) -> None:  # noqa: B027 - not needed by all
        """Drop cached conclusions, because the facts behind them have changed, such as the ops that a server offers."""

    def forget(self) -> None:  # noqa: B027 - not needed by all
        """Drop the recorded ops of an ended session, and facts about its devices. The caller holds the sink's lock."""

    def live(self, since: int) -> int:
        """Return the number of live values whose storages have the number `since` or a greater number."""
        del since
        return 0

    def values(self) -> Sequence[tuple[int, int]]:
        """Return the handles of all values that are not freed, and the bytes of their storages."""
        return ()

    def ops(self) -> tuple[int, int]:
        """Return the number of recorded ops, and of ops that were inferred with a meta kernel."""
        return 0, 0

    def send(self, fetch: tuple[int, ...] = (), describe: tuple[int, ...] = (), synchronize: bool = False) -> Ticket:
        """Send the recorded ops, and return a ticket for `Sink.wait`.

        Args:
            fetch: handles of values whose elements the reply contains.
            describe: handles of values whose metadata the reply contains.
            synchronize: True if the executor replies after its device has finished the ops.
        """
        self.sink.open()
        with self.sink.lock:
            *before, last = self.take() or [Submission(Program((), (), ()))]
            for submission in before:
                self.sink.submit(submission)
            return self.sink.submit(
                msgspec.structs.replace(last, fetch=fetch, describe=describe, synchronize=synchronize)
            )

    def run(
        self, fetch: tuple[int, ...] = (), describe: tuple[int, ...] = (), synchronize: bool = False
    ) -> SubmissionReply:
        """Send the recorded ops as `send` does, and wait for the reply."""
        return self.sink.wait(self.send(fetch, describe, synchronize))

    def synchronize(self) -> None:
        """Send the recorded ops, and wait until the devices have finished them."""
        self.run(synchronize=True)


@hookspec
def djinn_register_interception(settings: Any) -> Iterable[Interception]:
    """Return the interceptions that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. The setting `interception`
    names the interception that is used; by default it is the built-in `native`, which creates its device when `djinn`
    is imported. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
