"""Figures of one session for `/metrics`: what it has counted since it began, and what it has now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import attrs

from djinn_server.request_times import ModelTimes

# Every session has these.
EVERY_SESSION: Final = ("templates", "template_instructions", "poisoned_values", "peer_pending_bytes", "idle_bytes")


@attrs.define
class SessionCounters:
    """Counters of a session since it began, under their names in `/metrics`, which describes them. Only its own thread adds to them."""

    template_cache_hits: int = 0
    template_cache_misses: int = 0
    templates_compiled: int = 0
    template_requests: int = 0
    template_prepare_seconds: float = 0.0
    submissions_refused: int = 0
    poisoned_results: int = 0
    described_values: int = 0
    runs_ahead: int = 0
    runs_ahead_dropped: int = 0
    layout_corrections: int = 0


@attrs.frozen
class SessionGauges:
    """Present figures of a session.

    Attributes:
        amounts: figures that are added up over sessions, under their names in `/metrics`: `EVERY_SESSION`, and others.
        phase: the phase of its last program; empty if its client has not told.
        value_bytes: bytes of its values, by kind; empty if its client tells no kinds.
    """

    amounts: Mapping[str, int] = attrs.field(factory=dict)
    phase: str = ""
    value_bytes: Mapping[str, int] = attrs.field(factory=dict)


class MeteredSession(Protocol):
    """A session as the metrics of its executor see it; all methods are for any thread."""

    def holdings(self) -> tuple[int, Mapping[int, int]]:
        """Number of live values, and the bytes of their memory by its address: sessions may share some."""

    def live_values(self) -> int:
        """Number of live values, in constant time."""

    def counted(self) -> Mapping[str, float]:
        """Counters since it began, under their names in `/metrics`; in constant time."""

    def measured(self) -> SessionGauges:
        """Present figures."""

    def served(self) -> Mapping[str, ModelTimes]:
        """Durations of its requests by model."""
