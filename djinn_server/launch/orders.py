"""Messages between an executor process and its parent, as JSON lines over two pipes.

Orders go to the executor's standard input. Reports come back on a separate pipe. Secrets travel in orders, because
other users of the machine can read arguments and the environment. The end of the orders means that the parent is gone.
"""

from __future__ import annotations

from typing import Final, TypeVar

import attrs
import msgspec

from djinn_core.errors import StartupError
from djinn_core.registry.selection import Selection
from djinn_core.wire.executor_reports import Ready, Sessions
from djinn_core.wire.message_base import Count, Name
from djinn_server.launch.executor_config import ExecutorConfig

_T = TypeVar("_T")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First order: the executor's configuration.

    Attributes:
        directory: private directory for the local socket; the executor removes it when it ends.
        key: the key that tickets are signed with.
        config: the configuration, `ExecutorConfig.sendable`.
    """

    directory: str
    key: bytes
    config: ExecutorConfig

    def without_secrets(self) -> Start:
        """Return a copy without the signing key and plugin settings. After startup, the process keeps this copy."""
        return msgspec.structs.replace(self, key=b"", config=attrs.evolve(self.config, plugins=Selection()))

    def __repr__(self) -> str:
        """Describe the order without its secrets: the key and the settings of plugins."""
        return f"Start(directory={self.directory!r}, device={self.config.device!r})"


class ReportSessions(msgspec.Struct, frozen=True, tag="report"):
    """Order: report the sessions of the executor. The report (`Sessions`) repeats `number`."""

    number: Count


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Order: admit no further session, wait at most `seconds` for running sessions, then end."""

    seconds: float


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """Order: end the sessions that were opened with `tokens` (ids of tokens), which are no longer valid."""

    tokens: tuple[str, ...]


class End(msgspec.Struct, frozen=True, tag="end"):
    """Order: end a session, stop its computation and tell its client the reason."""

    session: Name
    reason: str


class AssignTenant(msgspec.Struct, frozen=True, tag="belong"):
    """Order: work for this tenant, and recover sessions of no other tenant."""

    tenant: str


Order = Start | ReportSessions | Drain | Evict | End | AssignTenant


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Report: the executor could not start, or its device is lost."""

    reason: str


FULL_SECONDS: Final = 5.0  # for which a `Full` report is valid


class Full(msgspec.Struct, frozen=True, tag="full"):
    """Report, sent without a request: the executor accepts no further session because of `reason`.

    If `reason` is empty, the executor accepts sessions again.
    """

    reason: str


Report = Ready | Failed | Sessions | Full

# `dec_hook` converts strings to paths: JSON has no paths.
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order, dec_hook=lambda kind, text: kind(text))
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def to_line(message: Order | Report) -> bytes:
    """Encode an order or a report as one line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def read_order(line: bytes) -> Order:
    """Decode an order of the parent process.

    Raises:
        StartupError: the line is invalid, because parent and executor run different versions of Djinn.
    """
    return _decode_line(line, _orders, "an executor cannot decode an order of its parent process")


def read_report(line: bytes) -> Report:
    """Decode a report of an executor.

    Raises:
        StartupError: the line is invalid, because parent and executor run different versions of Djinn.
    """
    return _decode_line(line, _reports, "cannot decode a report of an executor process")


def _decode_line(line: bytes, decoder: msgspec.json.Decoder[_T], failure: str) -> _T:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(
            f"{failure} ({error}): the executor and its parent process must run the same version of Djinn"
        ) from error
