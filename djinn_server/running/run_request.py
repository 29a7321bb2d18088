"""A submission with its bindings unpacked."""

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
HaltFlag = ctypes.c_int  # has an address, so that the library can look at it between two ops


class Progress:
    """The op that a session issues, for another thread to read.

    The loop over the ops in Python takes its numbers from here, at no cost; the library writes them to a cell.

    Attributes:
        paused: True while the session has yielded the device.
    """

    def __init__(self) -> None:
        self.paused = False
        self._loop: tuple[int, int, Iterator[int]] | None = None  # None: the library runs, or nothing yet
        self._cell = ctypes.c_int()

    def over(self, start: int, stop: int) -> Iterator[int]:
        """Return the numbers of the ops that are issued next."""
        numbers = iter(range(start, stop))
        self._loop = start, stop, numbers
        self.paused = False
        return numbers

    def cell(self, start: int) -> ctypes.c_int:
        """Return a cell for the library, which writes the number of each op to it. `start` is the number of the first op."""
        self._cell.value = start
        self._loop = None
        self.paused = False
        return self._cell

    @property
    def step(self) -> int:
        """Number of the op that is issued."""
        loop = self._loop
        if loop is None:
            return self._cell.value
        start, stop, numbers = loop
        return max(start, stop - 1 - length_hint(numbers))


class RunRequest(msgspec.Struct):
    """A submission, with the fields of `Submit`. `inputs`: handles of its template's inputs, once the template is bound.

    Attributes:
        halt: `YIELD` or `CANCEL` if no further op is to run for now; checked before each op.
        rest: callback after `halt` stopped the run. It returns True if the run pauses, False if it is cancelled. None: it is cancelled.
        rested: seconds spent in pauses.
        unreadable: error in its lists of handles; empty if they are valid.
        op_times: times each instruction; None: the client did not request times.
        stop_at: number of the op at which an earlier run stopped, or None. stop_reason: the device error that stopped it, if any.
        short: ops that ran out of memory in an earlier run, with the error. They fail again.
        progress: the op that is issued; None on CPUs.
        guard: makes the `StepGuard` of a template's ops after one ran out of memory; None: that op fails at once.
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
    short: Mapping[int, str] = MappingProxyType({})
    progress: Progress | None = None
    guard: Callable[[Any], Any] | None = None
    rest: Callable[[RunRequest], bool] | None = None
    rested: float = 0.0
    unreadable: str = ""
    op_times: OpTimes | None = None


def unpack(submit: Submit) -> RunRequest:
    """Return the request of a submission. Unreadable lists of handles are empty, and `unreadable` has the reason."""
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
