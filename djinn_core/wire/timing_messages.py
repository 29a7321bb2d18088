"""Timing messages for timelines: the executor's replies include execution times by its own clock."""

from typing import Annotated

import msgspec

from djinn_core.wire.message_base import Count, Message, Name, Seconds

TRANSFERS_TOLD = 1024  # limit per reply; further ones are left out


class TimingsRequest(Message, frozen=True):
    """Request execution times of submissions (`on`) and of each instruction (`ops`) in later replies, or stop them."""

    on: bool = True
    ops: bool = False


class TimingsReply(Message, frozen=True):
    """Reply to `TimingsRequest`: the present time of the executor process's clock, in seconds since an arbitrary moment."""

    instance: Name
    clock: Seconds


class TransferTimes(msgspec.Struct, frozen=True, array_like=True):
    """Begin, end and bytes of an executed `SendValues`; of an `AwaitTransfer` if `incoming` is True."""

    transfer: Count
    peer: Count
    incoming: bool
    begun: Seconds
    ended: Seconds
    nbytes: Count


class ExecutionTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of a submission in seconds, by the clock of the executor process `instance`.

    Attributes:
        taken: time at which the session begins to read the submission.
        ready: time at which the submission begins to wait for the device.
        begun: time at which the device begins the submission.
        executed: time at which its last instruction has run.
        done: time at which its results are ready.
        memory: bytes of the session's values at the end.
        ops: two little-endian float32 per instruction of the template: seconds from `begun` to its start, and its
            duration in seconds. Negative if not measured. Empty if not requested.
        transfers: transfers from and to other executors of the pool since the previous reply.
    """

    instance: Name
    taken: Seconds
    ready: Seconds
    begun: Seconds
    executed: Seconds
    done: Seconds
    memory: Count = 0
    ops: bytes = b""
    transfers: Annotated[tuple[TransferTimes, ...], msgspec.Meta(max_length=TRANSFERS_TOLD)] = ()
