"""Counters of what this process has captured, sent, received and waited for."""

from __future__ import annotations

import attrs


@attrs.define
class Stats:
    """Counts since the start or the last reset; sizes in bytes.

    `client_fallbacks` are ops that were computed on this machine because the executor cannot do them.
    Bytes are those of the connections, taken where they meet the socket; `bytes_uploaded` is the tensor data in them,
    `bytes_recalled` what the server had already.
    """

    instructions_sent: int = 0
    submissions: int = 0
    round_trips: int = 0
    bytes_uploaded: int = 0
    bytes_recalled: int = 0
    templates_sent: int = 0
    templates_reused: int = 0
    plans_made: int = 0
    plans_reused: int = 0
    client_fallbacks: int = 0
    server_seconds: float = 0.0
