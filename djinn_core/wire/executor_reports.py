"""Reports of an executor about itself: readiness, sessions and metrics."""

from __future__ import annotations

import msgspec

from djinn_core.wire.message_base import Count
from djinn_core.wire.messages import DeviceInfo, ServingFigures, SessionStatus


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Report that the executor listens at `urls`. The first URL is for this machine only."""

    urls: tuple[str, ...]
    process: int
    device: DeviceInfo
    torch: str


class Distribution(msgspec.Struct, frozen=True):
    """A histogram of durations: counts by upper bound, sum, and labels.

    Attributes:
        bounds: upper bounds in seconds. A further bucket counts longer durations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    labels: tuple[str, ...] = ()


class LabelledValue(msgspec.Struct, frozen=True):
    """A value of a metric with its labels, in the metric's label order."""

    labels: tuple[str, ...]
    value: float


class ExecutorMetrics(msgspec.Struct, frozen=True):
    """Metrics of a process by name: counters, gauges and histograms. Counters and gauges may also be `labelled`."""

    values: dict[str, float] = {}
    labelled: dict[str, tuple[LabelledValue, ...]] = {}
    distributions: dict[str, tuple[Distribution, ...]] = {}


class Sessions(msgspec.Struct, frozen=True, tag="sessions"):
    """Reply to the order `ReportSessions`, whose `number` it repeats: sessions, requests by model, latest log lines.

    Attributes:
        tokens: ids of the tokens with which sessions were opened.
    """

    number: Count
    device: DeviceInfo
    sessions: tuple[SessionStatus, ...]
    metered: ExecutorMetrics = ExecutorMetrics()
    tokens: tuple[str, ...] = ()
    models: tuple[ServingFigures, ...] = ()
    log: tuple[str, ...] = ()
