"""Programs that cannot be sent: what they would have made or written becomes poison, and the session goes on."""

from __future__ import annotations

from typing import Final

import msgspec

from djinn_core.errors import ProtocolError, UnsupportedOperation
from djinn_core.hookspecs.transports import Frame
from djinn_core.ir.program import Program
from djinn_core.wire import limits
from djinn_core.wire.bindings import pack_handles
from djinn_core.wire.messages import First, Submit, encode

# What encoding raises for numbers of more than 64 bits, texts that are none, and what is too deep or too large.
UNSENDABLE: Final = (ProtocolError, UnsupportedOperation, OverflowError, ValueError, TypeError, RecursionError)
_BESIDE_BYTES: Final = 1024  # that connections put before a message


def framed(message: Submit) -> Frame:
    """The message as a frame.

    Raises:
        UnsupportedOperation: it is larger than an executor takes.
        OverflowError, ValueError, TypeError, RecursionError: it cannot be encoded.
    """
    frame = Frame(encode(message))
    if len(frame.head) > limits.HEAD_BYTES - _BESIDE_BYTES:
        raise UnsupportedOperation(
            f"a program takes a message of {len(frame.head):,} bytes; an executor takes {limits.HEAD_BYTES:,}. "
            "Call ops for parts of their lists"
        )
    return frame


def refusing(submit: Submit, program: Program, reason: str) -> Submit:
    """`submit` with the results of `program` refused, for `reason`, in place of a program to run."""
    made: list[int] = []
    written: dict[int, None] = {}
    for instruction in program.instructions():
        made += instruction.outputs
        written.update(dict.fromkeys(instruction.writes))
    return msgspec.structs.replace(
        submit,
        outputs=pack_handles([handle for handle in made if handle not in program.dead]),
        first=First((), (), pack_handles(written)),
        refused=reason or "it cannot be encoded",
    )
