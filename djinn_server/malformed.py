"""Decode the readable part of a malformed message: enough to answer it and to poison its results.

Frames do not depend on the content of messages, so a malformed message does not affect the next message.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from djinn_core.errors import ProtocolError
from djinn_core.wire.binding_delta import Handles
from djinn_core.wire.frames import Frame
from djinn_core.wire.message_base import Count, Message, tag_of
from djinn_core.wire.messages import InitialBindings, Submit, TemplateReply, ValueHints, decode
from djinn_core.wire.upload_messages import BlobOffer, UploadPart
from djinn_core.wire.weight_messages import ReadWeights

_NOTHING = msgspec.Raw()


class _Submission(msgspec.Struct, frozen=True, array_like=True, tag=tag_of(Submit)):
    """The fields of `Submit` that a reply needs. Other fields are skipped."""

    sequence: Count
    fetch: Handles = ()
    free: Handles = ()
    digest: bytes = b""
    outputs: Handles = ()
    slot_changes: msgspec.Raw = _NOTHING
    input_changes: msgspec.Raw = _NOTHING
    first: msgspec.Raw = _NOTHING
    template: msgspec.Raw = _NOTHING
    describe: Handles = ()


class _Definition(msgspec.Struct, frozen=True, array_like=True, tag=tag_of(TemplateReply)):
    template: msgspec.Raw = _NOTHING
    first: msgspec.Raw = _NOTHING


class _UploadHandle(msgspec.Struct, frozen=True, array_like=True, tag=tag_of(UploadPart)):
    handle: Count


class _OfferHandle(msgspec.Struct, frozen=True, array_like=True, tag=tag_of(BlobOffer)):
    handle: Count


class _WeightHandle(msgspec.Struct, frozen=True, array_like=True, tag=tag_of(ReadWeights)):
    handle: Count


class _Hints(msgspec.Struct, frozen=True, array_like=True, tag=tag_of(ValueHints)):
    digest: msgspec.Raw


@attrs.frozen
class UnreadableSubmit:
    """A submission with an unreadable program. `submit`: readable fields. `reason`: the decoding error."""

    submit: Submit
    reason: str


@attrs.frozen
class UnreadableTemplate:
    """An unreadable template that the executor requested. `first`: its bindings, if they are readable."""

    first: InitialBindings | None
    reason: str


@attrs.frozen
class UnreadableUpload:
    """An upload message of which only the handle is readable. `offered`: True if it is a `BlobOffer`."""

    handle: int
    reason: str
    offered: bool = False


@attrs.frozen
class UnreadableHints:
    """Unreadable hints about values. They are ignored, because no result depends on them."""

    reason: str


Unreadable = UnreadableSubmit | UnreadableTemplate | UnreadableUpload | UnreadableHints
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    _Submission | _Definition | _UploadHandle | _OfferHandle | _WeightHandle | _Hints
)
_bindings_decoder: msgspec.msgpack.Decoder[InitialBindings] = msgspec.msgpack.Decoder(InitialBindings)


def decode_partially(head: bytes | memoryview, reason: str) -> Unreadable | None:
    """Return the readable part of a message, or None if it does not suffice. `reason`: the decoding error."""
    try:
        message = _decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    if isinstance(message, _Submission):
        submit = Submit(
            message.sequence,
            fetch=message.fetch,
            free=message.free,
            digest=message.digest,
            outputs=message.outputs,
            first=_decode_bindings(message.first),
            describe=message.describe,
        )
        return UnreadableSubmit(submit, reason)
    if isinstance(message, _Definition):
        return UnreadableTemplate(_decode_bindings(message.first), reason)
    if isinstance(message, _Hints):
        return UnreadableHints(reason)
    return UnreadableUpload(message.handle, reason, isinstance(message, _OfferHandle))


def _decode_bindings(raw: msgspec.Raw) -> InitialBindings | None:
    try:
        return _bindings_decoder.decode(raw) if bytes(raw) else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def decode_frame(frame: Frame) -> Message | Unreadable:
    """Return the message of a frame, or its readable part if it is malformed.

    Raises:
        ProtocolError: the readable part does not suffice to answer the message.
    """
    try:
        return decode(frame.head)
    except ProtocolError as error:
        readable = decode_partially(frame.head, str(error))
        if readable is None:
            raise
        return readable
