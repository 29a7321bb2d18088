"""Messages between a holder behind a command and the process that launched it: lines of JSON over the command's pipes."""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec

METHODS: Final = frozenset({"close", "full", "issue_ticket", "send", "status", "version", "wait", "wait_ready"})
_BYTES: Final = "base64"


class HolderCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of a method of the holder.

    Attributes:
        number: number of the call, which its reply repeats.
        method: name of the method, empty in the first call, whose arguments create the holder.
        arguments: positional arguments.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]


class HolderReply(msgspec.Struct, frozen=True, array_like=True):
    """Reply to a call.

    Attributes:
        number: number of the call.
        result: the method's result, or None after an error.
        error: message of a `StartupError`, or None.
    """

    number: int
    result: Any
    error: str | None = None


_calls: msgspec.json.Decoder[HolderCall] = msgspec.json.Decoder(HolderCall)
_replies: msgspec.json.Decoder[HolderReply] = msgspec.json.Decoder(HolderReply)


def call_line(number: int, method: str, arguments: tuple[Any, ...]) -> bytes:
    """Encode a call as a line."""
    return msgspec.json.encode(HolderCall(number, method, _packed(arguments))) + b"\n"


def reply_line(number: int, result: Any, error: str | None = None) -> bytes:
    """Encode a reply as a line."""
    return msgspec.json.encode(HolderReply(number, _packed(result), error)) + b"\n"


def read_call(line: bytes) -> HolderCall:
    """Decode a call from a line.

    Raises:
        msgspec.DecodeError: the line has no call.
    """
    read = _calls.decode(line)
    return HolderCall(read.number, read.method, tuple(map(_unpacked, read.arguments)))


def read_reply(line: bytes) -> HolderReply:
    """Decode a reply from a line.

    Raises:
        msgspec.DecodeError: the line has no reply.
    """
    read = _replies.decode(line)
    return HolderReply(read.number, _unpacked(read.result), read.error)


def _packed(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    return tuple(map(_packed, value)) if isinstance(value, tuple | list | set | frozenset) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        try:
            return base64.b64decode(value[_BYTES], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise msgspec.ValidationError(f"a JSON object is not encoded bytes: it needs the key {_BYTES!r}") from error
    return tuple(map(_unpacked, value)) if isinstance(value, list) else value
