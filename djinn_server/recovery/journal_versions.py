"""Check the versions of Djinn and torch that wrote a journal: only the same versions can replay it."""

from __future__ import annotations

from typing import Final

import msgspec

from djinn_core.errors import SessionLost
from djinn_core.registry.version import djinn_version
from djinn_core.wire.messages import PROTOCOL_VERSION

MAGIC: Final = b"DJNJ\2"  # the last byte is the version of the record format
JOURNAL_VERSION: Final = 4  # of records and snapshots; raise it if either changes


class JournalVersions(msgspec.Struct, frozen=True):
    """Versions that wrote a journal.

    The version of torch must match, because another version may compute different bits. `djinn` is only for messages.
    """

    journal: int
    protocol: int
    torch: str
    djinn: str


def present_versions() -> JournalVersions:
    """Return the versions of this process."""
    import torch  # late, because a process that only removes journals does not load torch

    return JournalVersions(JOURNAL_VERSION, PROTOCOL_VERSION, str(torch.__version__), djinn_version())


def check_versions(versions: JournalVersions) -> None:
    """Check that this process can replay a journal of these versions.

    Raises:
        SessionLost: a version differs. The message has a remedy.
    """
    current = present_versions()
    names = {"journal": "journal format", "protocol": "protocol version", "torch": "torch"}
    differing = [
        f"{product} {getattr(versions, name)} and not {getattr(current, name)}"
        for name, product in names.items()
        if getattr(versions, name) != getattr(current, name)
    ]
    if differing:
        raise SessionLost(
            f"the server was restarted with other versions. The session was written by Djinn {versions.djinn}, with {', '.join(differing)}. "
            f"To continue the session, restart the server with Djinn {versions.djinn} and torch {versions.torch}. Otherwise restart the "
            "program"
        )


def check_magic(magic: bytes, name: str) -> None:
    """Check that the first bytes of a file are those of a journal of this version.

    Raises:
        SessionLost: the bytes differ.
    """
    if magic == MAGIC:
        return
    if magic.startswith(MAGIC[:-1]):
        raise SessionLost(
            f"{name} was written by another version of Djinn: restart the server with that version to continue the session, or "
            "restart the program"
        )
    raise SessionLost(f"{name} is not a session journal")
