"""Reports of an executor about itself: that it is ready, and its sessions with their figures."""

from __future__ import annotations

import msgspec

from djinn_core.wire.message_base import Count
from djinn_core.wire.messages import DeviceInfo, ServingFigures, SessionStatus


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The executor listens at `urls`; the first is for this machine only."""

    urls: tuple[str, ...]
    process: int
    device: DeviceInfo
    torch: str


class Distribution(msgspec.Struct, frozen=True):
    """Histogram: counts of durations by upper bound in seconds (`bounds`, and one bucket above the last), their sum, labels of its own."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    labels: tuple[str, ...] = ()


class LabelledValue(msgspec.Struct, frozen=True):
    """One value of a metric with labels of its own: their values, in the order in which the metric names them."""

    labels: tuple[str, ...]
    value: float


class ExecutorMetrics(msgspec.Struct, frozen=True):
    """Metrics of an executor: totals (`counters`), present values (`gauges`), both `labelled` as well, and histograms."""

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    labelled: dict[str, tuple[LabelledValue, ...]] = {}
    distributions: dict[str, tuple[Distribution, ...]] = {}


class Sessions(msgspec.Struct, frozen=True, tag="sessions"):
    """Reply to the order `ReportSessions`: the sessions that run, requests by model, and the latest log lines.

    `tokens` are the ids of the tokens with which sessions were opened.
    """

    number: Count
    device: DeviceInfo
    sessions: tuple[SessionStatus, ...]
    metered: ExecutorMetrics = ExecutorMetrics()
    tokens: tuple[str, ...] = ()
    models: tuple[ServingFigures, ...] = ()
    log: tuple[str, ...] = ()
