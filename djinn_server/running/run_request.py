"""A submission whose lists of handles are unpacked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from types import MappingProxyType
from typing import Any, Final

import msgspec

from djinn_core.errors import ProtocolError
from djinn_core.wire.binding_delta import Handles, unpack_handles
from djinn_core.wire.messages import Claim, Submit
from djinn_server.running.timings import OpTimes

YIELD: Final = 1  # bits of `RunRequest.halt`
CANCEL: Final = 2
HaltFlag = ctypes.c_int  # has an address, so that the library can read it between two ops


class Progress:
    """The number of the op that a session issues, for a device watch in another thread.

    The Python loop iterates over `over`, whose position `step` reads. The native library writes numbers to `cell`.

    Attributes:
        paused: True while the session has yielded the device.
    """

    def __init__(self) -> None:
        self.paused = False
        self._loop: tuple[int, int, Iterator[int]] | None = None  # None: the library runs, or no op has run yet
        self._cell = ctypes.c_int()

    def over(self, start: int, stop: int) -> Iterator[int]:
        """Return an iterator over the numbers of the next ops, from `start` to `stop` (exclusive)."""
        numbers = iter(range(start, stop))
        self._loop = start, stop, numbers
        self.paused = False
        return numbers

    def cell(self, start: int) -> ctypes.c_int:
        """Return a C integer in which the library stores the number of the current op. `start`: number of the first op."""
        self._cell.value = start
        self._loop = None
        self.paused = False
        return self._cell

    @property
    def step(self) -> int:
        """Number of the op that is being issued."""
        loop = self._loop
        if loop is None:
            return self._cell.value
        start, stop, numbers = loop
        return max(start, stop - 1 - length_hint(numbers))


class RunRequest(msgspec.Struct):
    """A submission. Fields with the names of `Submit` have their meanings.

    Attributes:
        inputs: handles of the template's inputs, set when the submission is bound to its template.
        halt: `YIELD` or `CANCEL` to stop the run before the next op; 0 otherwise.
        stop_at: number of the op at which an earlier run of this submission stopped, or None.
        stop_reason: device error that stopped the earlier run; empty without one.
        earlier_shortages: ops that ran out of memory in the earlier run, with their errors. These ops fail again.
        progress: number of the op that is being issued; None on CPUs.
        guard: makes a `StepGuard` after an op ran out of memory; None: the op fails at once.
        on_halt: called after `halt` stopped the run. Returns True to yield the device and continue, False to cancel. None
            cancels.
        paused_seconds: time for which the run yielded the device.
        unreadable: error in the lists of handles; empty if they are valid.
        op_times: timer of each instruction; None if the client did not request times.
    """

    sequence: int
    outputs: list[int]
    fetch: list[int]
    describe: list[int]
    free: list[int]
    claims: Sequence[Claim]
    synchronize: bool
    inputs: list[int] = msgspec.field(default_factory=list)
    halt: HaltFlag = msgspec.field(default_factory=HaltFlag)
    stop_at: int | None = None
    stop_reason: str = ""
    earlier_shortages: Mapping[int, str] = MappingProxyType({})
    progress: Progress | None = None
    guard: Callable[[Any], Any] | None = None
    on_halt: Callable[[RunRequest], bool] | None = None
    paused_seconds: float = 0.0
    unreadable: str = ""
    op_times: OpTimes | None = None


def unpack(submit: Submit) -> RunRequest:
    """Return a submission with unpacked lists of handles. An unreadable list is empty, and `unreadable` has the error."""
    try:
        return RunRequest(
            submit.sequence,
            unpack_handles(submit.outputs) if submit.outputs else [],
            unpack_handles(submit.fetch) if submit.fetch else [],
            unpack_handles(submit.describe) if submit.describe else [],
            unpack_handles(submit.free) if submit.free else [],
            submit.claims,
            submit.synchronize,
        )
    except ProtocolError:
        return _unpack_readable(submit)


def _unpack_readable(submit: Submit) -> RunRequest:
    reasons: list[str] = []

    def unpacked(packed: Handles) -> list[int]:
        try:
            return unpack_handles(packed)
        except ProtocolError as error:
            reasons.append(str(error))
            return []

    outputs, fetch, describe, free = map(unpacked, (submit.outputs, submit.fetch, submit.describe, submit.free))
    work = RunRequest(submit.sequence, outputs, fetch, describe, free, submit.claims, submit.synchronize)
    work.unreadable = "; ".join(reasons)
    return work
