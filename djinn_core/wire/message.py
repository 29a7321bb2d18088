"""What all messages are made of: their base, the kinds of their fields, and failures, which several of them carry."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Secret = Annotated[str, msgspec.Meta(max_length=1024)]
# Passed on from one to another, so that nobody can have somebody else say more than random letters to a stranger.
Ticket = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[A-Za-z0-9_=-]*\Z")]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Dimensions = Annotated[tuple[int, ...], msgspec.Meta(max_length=64)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """Base of all messages: arrays without names, so that what a loop sends is short."""


class Failure(msgspec.Struct, frozen=True, tag="f", omit_defaults=True):
    """An instruction that failed: submission, position in it, op, name of the exception's type, message.

    `executor` is the number of the executor in its pool where the failure came from another one with a value; otherwise 0.
    """

    sequence: Count
    instruction: int
    op: Name
    kind: Name
    message: str
    executor: Count = 0
