"""Forecast of a plan's performance from its simulated run: modules by device, memory, times, and the bottleneck."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from djinn.planning import CostEstimate, DeviceCapabilities, PipelineResult, storage_of, storage_sizes
from djinn_core.planning.stages.simulate import Timeline

_LAYER = re.compile(r"^(.*?)(?:\.(\d+))(?:\.|$)")


@attrs.frozen
class DeviceForecast:
    """Predicted use of a device that runs a part of the program.

    Attributes:
        device: id of the device.
        modules: modules whose ops run on the device, in order, with numbered modules as ranges, such as
            `model.layers.0-39`.
        nodes: number of its ops.
        inputs: bytes of weights, caches and other inputs on the device.
        peak: peak bytes on the device.
        memory: bytes of memory that the device has.
        busy: seconds of work in one run.
        reason: why the policy placed ops on this device. If reasons differ, the most frequent one.
    """

    device: str
    modules: tuple[str, ...]
    nodes: int
    inputs: int
    peak: int
    memory: int
    busy: float
    reason: str


@attrs.frozen
class Forecast:
    """Predicted performance of one run and of successive runs of a program.

    Attributes:
        devices: the used devices.
        latency: seconds of a run if all weights and caches are on their devices.
        interval: seconds between pipelined runs.
        upload_bytes: bytes that only the first run uploads.
        upload_seconds: additional seconds of the first run.
        replicas: number of copies that fit into the cluster, each on its own devices.
        shares: fractions of device time by cause: `arithmetic`, `memory bandwidth`, `starting ops`.
        transfers: seconds in which links between devices are busy.
        limit: the resource that determines `interval`.
    """

    devices: tuple[DeviceForecast, ...]
    latency: float
    interval: float
    upload_bytes: int
    upload_seconds: float
    replicas: int
    shares: Mapping[str, float]
    transfers: float
    limit: str


def forecast(
    result: PipelineResult, timeline: Timeline, first_timeline: Timeline, peak_bytes: Mapping[str, int]
) -> Forecast:
    """Return the forecast of a scheduled plan.

    Args:
        result: the plan.
        timeline: the simulated run with all inputs on their devices.
        first_timeline: the simulated first run, which uploads the inputs.
        peak_bytes: peak bytes by device.

    Raises:
        ValueError: `result` has no placement or no costs.
    """
    placement = result.placement
    if placement is None or result.costs is None:
        raise ValueError("the plan has no placement or no costs, which a forecast needs: plan with until='schedule'")
    nodes: dict[str, list[int]] = defaultdict(list)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for decision in placement.decisions:
        nodes[decision.device].append(decision.node)
        reasons[decision.device][decision.reason] += 1
    sizes, input_bytes = storage_sizes(result.graph, result.graph.inputs), Counter[str]()
    for storage, device in {storage_of(v): placement.values[v] for v in result.graph.inputs}.items():
        input_bytes[device] += sizes[storage]
    devices = tuple(
        DeviceForecast(
            device,
            modules_of(result.graph.nodes[n].module for n in nodes[device]),
            len(nodes[device]),
            input_bytes[device],
            peak_bytes[device],
            result.topology.device(device).memory,
            timeline.devices[device].busy,
            reasons[device].most_common(1)[0][0],
        )
        for device in placement.devices
    )
    return Forecast(
        devices,
        timeline.seconds,
        timeline.interval,
        first_timeline.uploaded - timeline.uploaded,
        max(0.0, first_timeline.seconds - timeline.seconds),
        _replicas(result, timeline),
        _shares(result, nodes),
        sum(seconds for ends, seconds in timeline.links.items() if "client" not in ends),
        timeline.limit,
    )


def modules_of(paths: Iterable[str]) -> tuple[str, ...]:
    """Return a short list of module paths: each path ends at its first number, and numbers are joined to ranges.

    A path without a number is omitted if another path is inside it.
    """
    layers: dict[str, set[int]] = {}
    for path in paths:
        if not path:
            continue
        match = _LAYER.match(path)
        if match:
            layers.setdefault(match[1], set()).add(int(match[2]))
        else:
            layers.setdefault(path, set())
    whole = {name for name, numbers in layers.items() if any(other.startswith(f"{name}.") for other in layers)}
    return tuple(
        f"{name}.{span}" if span else name
        for name, numbers in layers.items()
        if numbers or name not in whole
        for span in (_spans(sorted(numbers)) or ("",))
    )


def _spans(numbers: Sequence[int]) -> tuple[str, ...]:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return tuple(f"{a}-{b}" if a != b else f"{a}" for a, b in spans)


def _shares(result: PipelineResult, nodes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the fractions of device time by cause, as `Forecast.shares`.

    The time of an op is its arithmetic or its memory time, whichever is longer, and the launch.
    """
    shares = dict.fromkeys(("arithmetic", "memory bandwidth", "starting ops"), 0.0)
    for device_id, its_nodes in nodes.items():
        device = result.topology.device(device_id)
        row = result.costs.by_device[device_id] if result.costs else ()
        for node in its_nodes:
            kind, seconds = _longest(row[node], device)
            shares[kind] += seconds
            shares["starting ops"] += max(0.0, row[node].seconds - seconds)
    whole = sum(shares.values()) or 1.0
    return {kind: seconds / whole for kind, seconds in shares.items()}


def _longest(estimate: CostEstimate, device: DeviceCapabilities) -> tuple[str, float]:
    arithmetic = estimate.operations / device.flops if device.flops else 0.0
    memory = (estimate.bytes_read + estimate.bytes_written) / device.bandwidth if device.bandwidth else 0.0
    longest = ("arithmetic", arithmetic) if arithmetic >= memory else ("memory bandwidth", memory)
    return longest[0], min(longest[1], estimate.seconds)


def _replicas(result: PipelineResult, line: Timeline) -> int:
    """Return the number of copies of the plan that fit into the cluster at once, on devices with equal properties."""
    counts_in_cluster = Counter(_make(d) for d in result.topology.devices)
    counts_used = Counter(_make(result.topology.device(d)) for d in line.devices)
    return min((counts_in_cluster[make] // count for make, count in counts_used.items()), default=0)


def _make(device: DeviceCapabilities) -> tuple[Any, ...]:
    return device.kind, device.name, device.memory, device.flops, device.bandwidth
