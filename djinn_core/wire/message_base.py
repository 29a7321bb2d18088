"""Building blocks of messages: base class, field types, and failures."""

from typing import Annotated, ClassVar, Final

import msgspec
from msgspec.structs import force_setattr

from djinn_core.system.printable import printable
from djinn_core.wire import limits

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Name = Annotated[
    str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")
]  # safe to display on a terminal line
Identifier = Annotated[
    str, msgspec.Meta(max_length=64)
]  # a lookup key, never displayed: no pattern, which would cost time in every reply
Address = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[\x21-\x7e]*\Z")]
Secret = Annotated[str, msgspec.Meta(max_length=8192)]  # signed tokens with claims are long
# Clients and executors forward tickets to third parties: the pattern prevents smuggled content.
Ticket = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[A-Za-z0-9_=-]*\Z")]
# A W3C `traceparent`: version 00, trace, span and flags; empty where nothing is traced.
Traceparent = Annotated[str, msgspec.Meta(max_length=55, pattern=r"^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")]
_HIDDEN = frozenset({"token", "ticket", "secret"})
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
GROUP_BYTES: Final = 32
GroupName = Annotated[bytes, msgspec.Meta(min_length=GROUP_BYTES, max_length=GROUP_BYTES)]
Dimensions = Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.DIMENSIONS)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """Base of all messages. They are encoded as arrays without field names, so that messages of loops are short."""

    def __repr__(self) -> str:
        """Return a text without secrets, for tracebacks and debuggers."""
        fields = (
            f"{name}={'...' if name in _HIDDEN else repr(getattr(self, name))}" for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(fields)})"


def tag_of(kind: type[msgspec.Struct]) -> str:
    """Return the tag of a message class on the wire."""
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


class PrintableFields:
    """Mixin for messages with text for people.

    The text is sanitized (`printable`), because the other end may send anything.
    """

    __slots__ = ()
    texts: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        for name in self.texts:
            force_setattr(self, name, printable(getattr(self, name)))  # type: ignore[arg-type] # mixed into structs alone


class Failure(PrintableFields, msgspec.Struct, frozen=True, tag="f", omit_defaults=True):
    """A failed instruction: submission, position in it, op, name of the exception type, message.

    Attributes:
        executor: number of the failed executor in its pool, if the failure came with a value of another executor;
            otherwise 0.
    """

    texts = ("message",)

    sequence: Count
    instruction: int
    op: Name
    kind: Name
    message: str
    executor: Count = 0
