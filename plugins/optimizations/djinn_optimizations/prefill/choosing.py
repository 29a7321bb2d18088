"""Choose the number and the lengths of prefill chunks by predicted times."""

from __future__ import annotations

import itertools
import math
from typing import Final

import attrs

from djinn.hooks import OptimizationContext
from djinn.planning import DataResidency, storage_of
from djinn_optimizations.prefill.rows import NotDivisible, Rows

MAX_TIME_RATIO: Final = 0.9  # maximum predicted time, as a share of the single-device time: predictions are inexact
TRANSFER_WAIT: Final = 4e-4  # seconds of waiting per transfer
PLANNING_PER_NODE: Final = 1e-4  # seconds of planning per op and chunk, for a new prompt length
AMORTIZING_RUNS: Final = 8  # number of prompts of equal length that share the planning time
ROW_STEP: Final = 8  # chunk lengths are multiples of this number of rows, except for the last chunk
MAX_MEMORY_SHARE: Final = 0.9  # share of a device's free memory that weights may fill


@attrs.frozen
class ChunkChoice:
    """Chunks of a prompt.

    Attributes:
        ends: end row of each chunk, exclusive.
        reason: the reason for this choice, for users.
    """

    ends: tuple[int, ...]
    reason: str


@attrs.frozen
class _Times:
    """Predicted seconds of the program on the fastest device.

    Attributes:
        linear: seconds of work that is proportional to the number of rows.
        attention: seconds of attention.
        undivided: seconds of work that cannot be divided.
    """

    linear: float
    attention: float
    undivided: float

    def seconds_between(self, start: float, end: float) -> float:
        """Return the seconds of the rows from `start` to `end`, which are shares of the prompt.

        A chunk that does not start at row 0 runs attention with a mask, which also computes the masked scores.
        """
        pairs = end * end if not start else 2 * end * (end - start)
        return self.linear * (end - start) + self.attention * pairs

    @property
    def on_one_device(self) -> float:
        """Seconds of the whole prompt on one device."""
        return self.seconds_between(0.0, 1.0) + self.undivided


def choose(context: OptimizationContext, rows: Rows) -> ChunkChoice:
    """Return the chunks with the shortest predicted time.

    Raises:
        NotDivisible: no number of chunks is fast enough compared with one device.
    """
    times = _times(context, rows)
    candidates = [
        candidate
        for count in range(2, len(context.topology.devices) + 1)
        if (candidate := _plan_chunks(context, rows, times, count))
    ]
    if not candidates:
        raise NotDivisible(f"{rows.rows} rows are too few to split, or the weights are too large to copy")
    seconds, ends = min(candidates)
    one_device = times.on_one_device
    planning = PLANNING_PER_NODE * len(context.graph.nodes) * len(ends) / AMORTIZING_RUNS
    if seconds + planning > min(MAX_TIME_RATIO, 1 - context.margin) * one_device:
        raise NotDivisible(
            f"{rows.rows} rows would take {seconds * 1000.0:.3g} ms if split, and {one_device * 1000.0:.3g} ms on one device"
        )
    sizes = " and ".join(str(end - start) for start, end in zip((0, *ends), ends, strict=False))
    return ChunkChoice(
        ends, f"{rows.rows} rows in chunks of {sizes}: {seconds * 1e3:.3g} ms, on one device {one_device * 1e3:.3g} ms"
    )


def _times(context: OptimizationContext, rows: Rows) -> _Times:
    def seconds_of(nodes: object, row: object) -> float:
        return math.fsum(row[n].seconds for n in nodes)  # type: ignore[index, attr-defined]

    options = [
        _Times(seconds_of(rows.splits, row), seconds_of(rows.attention, row), seconds_of(rows.undivided, row))
        for row in context.costs.by_device.values()
    ]
    return min(options, key=lambda times: times.on_one_device)


def _plan_chunks(
    context: OptimizationContext, rows: Rows, times: _Times, count: int
) -> tuple[float, tuple[int, ...]] | None:
    """Return the predicted seconds of a run in `count` chunks, and the end row of each chunk.

    Return None if the rows are too few, or if fewer than `count` devices can hold all weights.
    """
    if rows.rows < 2 * ROW_STEP * count or not _weights_fit(context, count):
        return None
    ends = _ends(rows.rows, times, count)
    shares = [0.0, *(end / rows.rows for end in ends)]
    busiest = max(times.seconds_between(start, end) for start, end in itertools.pairwise(shares))
    bytes_sent = _bytes_of_keys_and_values(rows) * ends[-2] / rows.rows
    bandwidth, latency = _slowest_link(context)
    layers = max(1, len(rows.attention))
    sending = bytes_sent / bandwidth if bandwidth else 0.0
    last_chunk_wait = (sending + latency) / layers + latency  # the last chunk waits for its operands in the last layer
    transfer_waits = TRANSFER_WAIT * 2 * layers * (count - 1)
    return max(busiest, sending) + last_chunk_wait + transfer_waits + times.undivided, ends


def _ends(rows: int, times: _Times, count: int) -> tuple[int, ...]:
    """Return the end rows of `count` chunks of equal time. Later chunks are shorter: their rows attend to more rows."""
    low, high = 0.0, times.seconds_between(0.0, 1.0)
    for _ in range(30):  # bisection for the minimum time per chunk in which the chunks cover all rows
        middle = (low + high) / 2
        low, high = (low, middle) if _ends_at_pace(times, count, middle)[-1] >= 1.0 else (middle, high)
    ends = [round(share * rows / ROW_STEP) * ROW_STEP for share in _ends_at_pace(times, count, high)[:-1]]
    return (*(max(ROW_STEP * n, min(end, rows - ROW_STEP * (count - n))) for n, end in enumerate(ends, 1)), rows)


def _ends_at_pace(times: _Times, count: int, seconds: float) -> list[float]:
    """Return the ends of `count` chunks that take `seconds` each, as shares of the rows."""
    ends, start = [], 0.0
    for _ in range(count):
        low, high = start, 1.0
        if times.seconds_between(start, 1.0) > seconds:
            for _ in range(30):
                middle = (low + high) / 2
                low, high = (middle, high) if times.seconds_between(start, middle) <= seconds else (low, middle)
        else:
            low = 1.0
        start = low
        ends.append(start)
    return ends


def _bytes_of_keys_and_values(rows: Rows) -> int:
    return sum(rows.graph.meta(v).nbytes for a in rows.attention.values() for v in (a.key, a.value))


def _slowest_link(context: OptimizationContext) -> tuple[float, float]:
    """Return the lowest bandwidth (bytes per second) and the highest latency (seconds) of links between devices.

    Both are 0 if no link was measured.
    """
    ids = {device.id for device in context.topology.devices}
    links = [link for link in context.topology.links if {link.source, link.target} <= ids]
    bandwidth = min((link.bandwidth for link in links if link.bandwidth), default=0.0)
    return bandwidth, max((link.latency for link in links), default=0.0)


def _weights_fit(context: OptimizationContext, count: int) -> bool:
    """Return True if at least `count` devices can each hold all weights."""
    weights: dict[int, int] = {}
    for value in context.graph.inputs:
        if context.profile.residency.get(value) is DataResidency.PERSISTENT_WEIGHT:
            storage = storage_of(value)
            weights[storage] = max(weights.get(storage, 0), context.graph.meta(value).nbytes)
    nbytes = sum(weights.values())
    large_enough = [d for d in context.topology.devices if not d.memory or nbytes <= MAX_MEMORY_SHARE * d.memory]
    return len(large_enough) >= count
