"""A submission with its bindings unpacked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from djinn_core.errors import ProtocolError
from djinn_core.wire.binding_delta import Handles, unpack_handles
from djinn_core.wire.messages import Claim, Submit
from djinn_server.running.timings import OpTimes

YIELD: Final = 1  # bits of `RunRequest.halt`
CANCEL: Final = 2
HaltFlag = ctypes.c_int  # has an address, so that the library can look at it between two ops


class RunRequest(msgspec.Struct):
    """The request of a submission, as in `Submit`; `inputs` are those of its template, once that is known.

    Attributes:
        halt: `YIELD` or `CANCEL` if no further op is to run for now; checked before each op.
        rest: called then with this, returns True if the run goes on afterwards; None: the submission is cancelled.
        rested: seconds spent in `rest`.
        unreadable: what is wrong with its handles; empty if nothing is.
        op_times: times each instruction; None: that was not asked for.
        ahead: seconds for which it has run before it came.
        stop_at: number of the op at which an earlier run was stopped; None: it was not. stop_reason: the device error of that op,
            if that stopped it.
        relieve: frees memory of an accelerator after an op ran out of it; None: the op fails at once.
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
    relieve: Callable[[], None] | None = None
    rest: Callable[[RunRequest], bool] | None = None
    rested: float = 0.0
    ahead: float = 0.0
    unreadable: str = ""
    op_times: OpTimes | None = None


def unpack(submit: Submit) -> RunRequest:
    """The work of a submission. Lists of handles that cannot be read are empty, and `unreadable` says why."""
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
