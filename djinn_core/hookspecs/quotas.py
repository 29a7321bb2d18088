"""Quotas: limits of what a tenant may use of a server."""

from __future__ import annotations

from typing import Annotated

import msgspec

from djinn_core.wire.message_base import Count

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """Quota of a tenant on each executor; 0: no limit.

    Attributes:
        sessions: how many at a time.
        values: live tensors of all its sessions.
        memory: their bytes.
        seconds_an_hour: time on the device within an hour.
        disk: bytes of weights that are kept for it.
        connections_a_minute: how often it may connect; 0: the server's own limit alone.
        requests_a_second: messages to each executor; more than that wait.
    """

    sessions: Count = 0
    values: Count = 0
    memory: Count = 0
    seconds_an_hour: _Seconds = 0.0
    disk: Count = 0
    connections_a_minute: Count = 0
    requests_a_second: Count = 0
