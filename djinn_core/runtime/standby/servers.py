"""Servers that may take a session over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from djinn_core.config import Settings, bytes_of
from djinn_core.errors import TransportError
from djinn_core.logs import get_logger
from djinn_core.runtime.connecting.client_channel import ClientChannel
from djinn_core.runtime.standby.connection import StandbyConnection
from djinn_core.wire.messages import Attached

_log = get_logger("djinn.session")


@attrs.frozen
class StandbyServer:
    """A server that may take a session over which began with an executor that said `first`."""

    name: str
    first: Attached
    dial: Callable[[], tuple[ClientChannel, Attached]]

    def begin(self) -> tuple[ClientChannel, Attached]:
        """A channel to an executor of it, in a new session, and what that said.

        Raises:
            TransportError: it cannot be reached, or has another kind of device.
            AccessRefused: it does not let this client in.
        """
        channel, attached = self.dial()
        reason = _unlike(self.first, attached)
        if reason:
            channel.close()
            raise TransportError(reason)
        return channel, attached


def _unlike(first: Attached, now: Attached) -> str:
    """Reason why an executor would not compute the same as the first one; empty if it would."""
    if first.device.kind != now.device.kind:
        return f"it has a {now.device.kind} where there was a {first.device.kind}"
    if first.torch.partition("+")[0] != now.torch.partition("+")[0]:
        return f"it runs torch {now.torch} where there was {first.torch}"
    if not set(first.compressions) <= set(now.compressions):
        return (
            f"it cannot read {', '.join(set(first.compressions) - set(now.compressions))}, in which uploads were sent"
        )
    return ""


def with_standby(
    connection: ClientChannel, server: str, others: Sequence[StandbyServer], settings: Settings, sessions: int
) -> ClientChannel:
    """Wrap a session's connection for failover to other servers; unchanged, with a log line, where no file can be written.

    `sessions`: how many share what the settings allow to be logged.
    """
    try:
        return StandbyConnection(connection, server, others, bytes_of(settings.standby_gib) // sessions)
    except OSError as error:
        _log.warning("no standby server can take this session over: nothing can be logged", reason=str(error))
        return connection
