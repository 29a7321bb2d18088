"""Metrics of one session: counters since the session began, and present gauges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import attrs

from djinn_server.request_times import ModelTimes

# Gauges that every session has.
EVERY_SESSION: Final = ("templates", "template_instructions", "poisoned_values", "peer_pending_bytes", "idle_bytes")


@attrs.define
class SessionCounters:
    """Counters since a session began, by their names in `/metrics`. Only the session's thread changes them."""

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
    """Present gauges of a session.

    Attributes:
        amounts: gauges that are summed over sessions, by their names in `/metrics`.
        phase: phase of the last program, such as decode; empty if the client sent no hints.
        value_bytes: bytes of values by kind, such as weights; empty if the client sent no hints.
    """

    amounts: Mapping[str, int] = attrs.field(factory=dict)
    phase: str = ""
    value_bytes: Mapping[str, int] = attrs.field(factory=dict)


class MeteredSession(Protocol):
    """The functions of a session that collect metrics. Thread-safe."""

    def holdings(self) -> tuple[int, Mapping[int, int]]:
        """Return the number of live values, and their bytes by address. Sessions may share addresses."""

    def live_values(self) -> int:
        """Return the number of live values, in constant time."""

    def counters(self) -> Mapping[str, float]:
        """Return the counters since the session began, by their names in `/metrics`, in constant time."""

    def gauges(self) -> SessionGauges:
        """Return the current gauges of the session."""

    def request_times(self) -> Mapping[str, ModelTimes]:
        """Return the durations of requests by model."""
