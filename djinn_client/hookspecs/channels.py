"""`djinn_register_channels`: wrap the channel of a session to its executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from djinn_client.hookspecs.client_channel import ClientChannel
from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.session_channel import PlainChannel, inner_property
from djinn_core.wire.messages import Attached


class WrappedChannel(PlainChannel, ClientChannel):
    """Base of channel wrappers: passes everything on to the inner channel. Override the methods that differ."""

    _inner: ClientChannel
    crashes_executors = inner_property("crashes_executors")
    logged = inner_property("logged")
    successor = inner_property("successor")
    reconnection = inner_property("reconnection")

    def __init__(self, inner: ClientChannel) -> None:
        super().__init__(inner)

    def limit_reconnect_seconds(self, patience: float) -> None:
        """Limit reconnection to `patience` seconds, unless the current limit is lower."""
        self._inner.limit_reconnect_seconds(patience)

    def call_when_resumed(self, callback: Callable[[float], None]) -> None:
        """Call `callback` after each reconnection, with the number of seconds that the connection was down."""
        self._inner.call_when_resumed(callback)

    def copy_borrowed(self) -> None:
        """Copy the buffers of frames that may be sent again, because their owner is about to change this memory."""
        self._inner.copy_borrowed()

    def expire(self) -> None:
        """Forbid reconnection. The current connection continues."""
        self._inner.expire()


@attrs.frozen
class StandbyServer:
    """A server that may take over a session.

    Attributes:
        name: address of the server, as messages call it.
        open: begins another session on the server, and returns its channel and the reply of its executor. It raises
            `DjinnError` if the server cannot be reached or refuses the client.
    """

    name: str
    open: Callable[[], tuple[ClientChannel, Attached]]


@attrs.frozen
class ChannelContext:
    """A session that has begun, as a channel wrapper sees it.

    Attributes:
        server: the server's address, as messages call it.
        attached: reply of the executor that has the session, with its device and version of PyTorch.
        standby: servers that may take the session over, in order of preference. Empty if the setting `standby` is
            empty, and for wrappers that do not declare `takes_over`.
        log_bytes: limit of the bytes that a wrapper may log on this machine's disk, for a replay on another server.
    """

    server: str
    attached: Attached
    standby: tuple[StandbyServer, ...] = ()
    log_bytes: int = 0


class ChannelWrapper(ABC):
    """Wrap the client's channel to an executor, on the thread that begins the session.

    A session calls `send` of the channel from several threads, and `receive` from one thread at a time. A slow channel delays the program.
    An exception ends the session. The channel must pass on all frames, in order.

    Attributes:
        name: unique among wrappers of channels.
        takes_over: True if the channel continues a lost session on one of `ChannelContext.standby`. The setting `standby` requires such a wrapper.
    """

    name: str
    takes_over: bool = False

    @abstractmethod
    def wrap(self, channel: ClientChannel, context: ChannelContext) -> ClientChannel:
        """Return the channel that the session uses: a `WrappedChannel` around `channel`, or the unchanged `channel`."""


@hookspec
def djinn_register_channels(settings: Any) -> Iterable[ChannelWrapper]:
    """Return the wrappers of channels that this plugin offers.

    Called once in the client process, before the first session begins, and when the plugins are configured again. Each
    wrapper wraps the channel of each session: first the wrapper that takes sessions over, then the others by name. If
    several wrappers take sessions over, the core uses the first of them by name. If `wrap` raises, no session begins,
    and the error names the plugin. If the hook raises, the plugin is disabled.
    """
    del settings
    raise NotImplementedError
