"""Quotas: limits on a tenant's use of a server."""

from __future__ import annotations

from typing import Annotated

import msgspec

from djinn_core.wire.message_base import Count

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """Quota of a tenant on each executor; 0: no limit.

    Attributes:
        sessions: simultaneous sessions.
        values: live tensors of all its sessions.
        memory: bytes of live tensors of all its sessions.
        seconds_an_hour: device time per hour.
        disk: bytes on disk: weights in the store, journals and spilled values.
        connections_a_minute: connections per minute; 0: only the server's own limit.
        requests_a_second: messages per second to each executor; further messages wait.
    """

    sessions: Count = 0
    values: Count = 0
    memory: Count = 0
    seconds_an_hour: _Seconds = 0.0
    disk: Count = 0
    connections_a_minute: Count = 0
    requests_a_second: Count = 0
