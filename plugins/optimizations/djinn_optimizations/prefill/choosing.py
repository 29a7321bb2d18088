"""Choose the number and the lengths of prefill chunks by predicted times."""

from __future__ import annotations

import itertools
import math
from typing import Final

import attrs

from djinn.hooks import OptimizationContext
from djinn.planning import DataResidency, storage_of
from djinn_optimizations.prefill.rows import NotDivisible, Rows

MAX_TIME_RATIO: Final = 0.9  # maximum time as a share of the single-device time, because predictions are inexact
PART: Final = 4e-4  # seconds of waiting per transfer
PLANNING: Final = 1e-4  # seconds of planning per op and chunk, for a new prompt length
RUNS: Final = 8  # prompts of one length that share the planning time
STEP: Final = 8  # chunk lengths are multiples of this number of rows, except for the last chunk
FULL: Final = 0.9  # share of a device's free memory that weights may fill


@attrs.frozen
class ChunkChoice:
    """How to divide a prompt.

    Attributes:
        ends: end row of each chunk.
        reason: the reason for this choice.
    """

    ends: tuple[int, ...]
    reason: str


@attrs.frozen
class _Times:
    """Predicted seconds of the program on the fastest device.

    Attributes:
        linear: seconds of work that is proportional to the number of rows.
        attention: seconds of attention.
        whole: seconds of work that cannot be divided.
    """

    linear: float
    attention: float
    whole: float

    def between(self, start: float, end: float) -> float:
        """Return the seconds of the rows from `start` to `end`, both given as shares of the prompt.

        Attention with a mask also computes the masked scores.
        """
        pairs = end * end if not start else 2 * end * (end - start)
        return self.linear * (end - start) + self.attention * pairs

    @property
    def alone(self) -> float:
        """Return the seconds of the whole prompt on one device."""
        return self.between(0.0, 1.0) + self.whole


def choose(context: OptimizationContext, rows: Rows) -> ChunkChoice:
    """Return the chunks with the shortest predicted time.

    Raises:
        NotDivisible: no number of chunks is fast enough compared with one device.
    """
    times = _times(context, rows)
    candidates = [
        divided
        for count in range(2, len(context.topology.devices) + 1)
        if (divided := _divided(context, rows, times, count))
    ]
    if not candidates:
        raise NotDivisible(f"{rows.rows} rows are too few to split, or the weights are too large to copy")
    seconds, ends = min(candidates)
    alone = times.alone
    planning = PLANNING * len(context.graph.nodes) * len(ends) / RUNS
    if seconds + planning > min(MAX_TIME_RATIO, 1 - context.margin) * alone:
        raise NotDivisible(
            f"split, {rows.rows} rows would take {seconds * 1000.0:.3g} ms; on one device {alone * 1000.0:.3g} ms"
        )
    sizes = " and ".join(str(end - start) for start, end in zip((0, *ends), ends, strict=False))
    return ChunkChoice(
        ends, f"{rows.rows} rows in chunks of {sizes}: {seconds * 1e3:.3g} ms, on one device {alone * 1e3:.3g} ms"
    )


def _times(context: OptimizationContext, rows: Rows) -> _Times:
    def taken(nodes: object, row: object) -> float:
        return math.fsum(row[n].seconds for n in nodes)  # type: ignore[index, attr-defined]

    options = [
        _Times(taken(rows.splits, row), taken(rows.attention, row), taken(rows.whole, row))
        for row in context.costs.by_device.values()
    ]
    return min(options, key=lambda times: times.alone)


def _divided(
    context: OptimizationContext, rows: Rows, times: _Times, count: int
) -> tuple[float, tuple[int, ...]] | None:
    """Return the seconds of a run in `count` chunks, and the ends of the chunks.

    If this is not possible, return None.
    """
    if rows.rows < 2 * STEP * count or not _weights_fit(context, count):
        return None
    ends = _ends(rows.rows, times, count)
    shares = [0.0, *(end / rows.rows for end in ends)]
    busiest = max(times.between(start, end) for start, end in itertools.pairwise(shares))
    bytes_sent = _bytes_of_keys_and_values(rows) * ends[-2] / rows.rows
    bandwidth, latency = _slowest(context)
    layers = max(1, len(rows.attention))
    sending = bytes_sent / bandwidth if bandwidth else 0.0
    behind = (sending + latency) / layers + latency  # waiting time of the last chunk in the last layer
    handing = PART * 2 * layers * (count - 1)
    return max(busiest, sending) + behind + handing + times.whole, ends


def _ends(rows: int, times: _Times, count: int) -> tuple[int, ...]:
    """Return the ends of chunks that take equal times. The rows of a chunk attend to all earlier rows."""
    low, high = 0.0, times.between(0.0, 1.0)
    for _ in range(30):  # bisection for the least time per chunk that covers all rows
        middle = (low + high) / 2
        low, high = (low, middle) if _reached(times, count, middle)[-1] >= 1.0 else (middle, high)
    ends = [round(share * rows / STEP) * STEP for share in _reached(times, count, high)[:-1]]
    return (*(max(STEP * n, min(end, rows - STEP * (count - n))) for n, end in enumerate(ends, 1)), rows)


def _reached(times: _Times, count: int, seconds: float) -> list[float]:
    """Return the ends of chunks that take `seconds` each, as shares of the rows."""
    ends, start = [], 0.0
    for _ in range(count):
        low, high = start, 1.0
        if times.between(start, 1.0) > seconds:
            for _ in range(30):
                middle = (low + high) / 2
                low, high = (middle, high) if times.between(start, middle) <= seconds else (low, middle)
        else:
            low = 1.0
        start = low
        ends.append(start)
    return ends


def _bytes_of_keys_and_values(rows: Rows) -> int:
    return sum(rows.graph.meta(v).nbytes for a in rows.attention.values() for v in (a.key, a.value))


def _slowest(context: OptimizationContext) -> tuple[float, float]:
    """Return the bandwidth and latency of the slowest link between two devices. If no link was measured, both are 0."""
    ids = {device.id for device in context.topology.devices}
    links = [link for link in context.topology.links if {link.source, link.target} <= ids]
    bandwidth = min((link.bandwidth for link in links if link.bandwidth), default=0.0)
    return bandwidth, max((link.latency for link in links), default=0.0)


def _weights_fit(context: OptimizationContext, count: int) -> bool:
    """Return True if each of `count` devices can hold all weights."""
    weights: dict[int, int] = {}
    for value in context.graph.inputs:
        if context.profile.residency.get(value) is DataResidency.PERSISTENT_WEIGHT:
            storage = storage_of(value)
            weights[storage] = max(weights.get(storage, 0), context.graph.meta(value).nbytes)
    nbytes = sum(weights.values())
    roomy = [d for d in context.topology.devices if not d.memory or nbytes <= FULL * d.memory]
    return len(roomy) >= count
