"""Messages between an executor process and its parent: JSON lines over two pipes.

Orders go down the executor's standard input, reports come back on a pipe of their own. Secrets travel this way, never in
arguments or the environment, which other users of the machine can read. The end of the orders means that the parent is
gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from djinn_core.errors import StartupError
from djinn_core.launch.executor_config import ExecutorConfig
from djinn_core.wire.executor_reports import Ready, Sessions
from djinn_core.wire.message_base import Count, Name


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First order: the executor's configuration.

    Attributes:
        directory: private directory for the local socket; the executor removes it when it ends.
        key: what the tickets are signed with.
        config: what to be; its settings of plugins are `sendable`.
    """

    directory: str
    key: bytes
    config: ExecutorConfig

    def __repr__(self) -> str:
        """Without secrets: the key, and settings of plugins."""
        return f"Start(directory={self.directory!r}, device={self.config.device!r})"


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Ask for a `Sessions` report with the same number."""

    number: Count


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new sessions, wait at most `seconds` for those that run, then end."""

    seconds: float


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """End the sessions that were opened with one of these tokens (their ids), which are no longer valid."""

    tokens: tuple[str, ...]


class End(msgspec.Struct, frozen=True, tag="end"):
    """End a session: stop its computation and tell its client the reason."""

    session: Name
    reason: str


class Belong(msgspec.Struct, frozen=True, tag="belong"):
    """Assign the executor to a tenant. It recovers no other tenant's sessions, even for a client that has their secrets."""

    tenant: str


Order = Start | Report | Drain | Evict | End | Belong


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The executor could not start."""

    reason: str


FULL_SECONDS: Final = 5.0  # for which it holds that there is no room, unless a session ends


class Full(msgspec.Struct, frozen=True, tag="full"):
    """Unsolicited report: a client was refused for lack of room, for `reason`; an empty `reason`: there is room again."""

    reason: str


Answer = Ready | Failed | Sessions | Full

# Paths are what JSON does not have a form for.
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order, dec_hook=lambda kind, text: kind(text))
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def to_line(message: Order | Answer) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def read_order(line: bytes) -> Order:
    """The order on a line.

    Raises:
        StartupError: it is not valid; parent and executor run different versions of Djinn.
    """
    try:
        return _orders.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(
            f"an executor cannot read what its parent process ordered ({error}): both must run the same Djinn"
        ) from error


def read_answer(line: bytes) -> Answer:
    """The answer on a line.

    Raises:
        StartupError: it is not valid; parent and executor run different versions of Djinn.
    """
    try:
        return _answers.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(
            f"cannot read what an executor process reported ({error}): both must run the same Djinn"
        ) from error
