"""Timing messages: while a client draws a timeline, an executor says with each reply when it did what, by its own clock."""

from typing import Annotated

import msgspec

from djinn_core.wire.message_base import Count, Message, Name, Seconds

TRANSFERS_TOLD = 1024  # of one reply; more are left out


class TimingsRequest(Message, frozen=True):
    """Say with the replies to submissions from now on when they ran (`on`), and each of their instructions (`ops`); or no more."""

    on: bool = True
    ops: bool = False


class TimingsReply(Message, frozen=True):
    """Reply to `TimingsRequest`: a sample of the clock of an executor process, in seconds since some moment of its own."""

    instance: Name
    clock: Seconds


class TransferTimes(msgspec.Struct, frozen=True, array_like=True):
    """Transfer of `SendValues` or, `incoming`, of `AwaitTransfer`: when its session began and ended to handle it; bytes."""

    transfer: Count
    peer: Count
    incoming: bool
    begun: Seconds
    ended: Seconds
    nbytes: Count


class ExecutionTimes(msgspec.Struct, frozen=True, array_like=True):
    """Moments of a submission by the clock of an executor process (`instance`).

    Attributes:
        taken: its session began to read it. ready: it waits for its turn on the device. begun: the device begins it.
        executed: its last instruction has run. done: its results are ready to be sent.
        memory: bytes of the session's values then.
        ops: for each instruction of the template, as two little-endian float32, seconds from `begun` to its beginning and
            seconds that it took; negative where it was not measured. Empty where that was not asked for.
        transfers: transfers from and to other executors of the pool since the reply before.
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
