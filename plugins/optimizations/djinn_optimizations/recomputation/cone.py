"""Find the nodes that a device could run itself instead of receiving their results from other devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import attrs

from djinn.hooks import OptimizationContext
from djinn.planning import DataResidency, DeviceCapabilities, Node, Placement, storage_of
from djinn_core.ir.replicas import repeatable

# Recomputing may take this many times as long as sending, because it runs while the other device computes the same values.
MAX_COMPUTE_RATIO = 16.0
MAX_NODES = 512  # maximum number of nodes to visit per device
AMORTIZING_RUNS = 8  # number of runs that share the time of copying a weight, because the copy stays on the device


@attrs.frozen(eq=False)
class Cone:
    """Nodes that a device could run to compute the values that other devices send to it.

    Attributes:
        device: the device.
        wanted: values that the device uses and other devices compute.
        makes: for each node that the device could run, its results.
        needs: for each node that the device could run, its operands that are not on the device.
        sending: seconds to send a value to the device, by value. Values on the device are left out.
        seconds: seconds on the device, by node.
        home: device on which the plan places a value, by value.
    """

    device: str
    wanted: tuple[int, ...]
    makes: Mapping[int, tuple[int, ...]]
    needs: Mapping[int, tuple[int, ...]]
    sending: Mapping[int, float]
    seconds: Mapping[int, float]
    home: Mapping[int, str]


def cones(context: OptimizationContext, placement: Placement) -> list[Cone]:
    """Return a cone for each device that could compute some of its received values itself."""
    makes = {d.id: _model_of(d) for d in context.topology.devices}
    fixed = _Decisions(context, placement, makes)
    return [cone for device, values in fixed.wanted().items() if (cone := _Search(fixed, device, values).cone())]


def _model_of(device: DeviceCapabilities) -> tuple[str, str]:
    """Return a key of the device's model. Devices of the same model compute equal results."""
    return device.kind, device.name


@attrs.frozen(eq=False)
class _Decisions:
    """Decisions of earlier planning stages.

    Attributes:
        makes: key of the device model, by device.
        device_of: device by node.
        written: storages that the program writes.
        inputs: input values of the program.
    """

    context: OptimizationContext
    placement: Placement
    makes: Mapping[str, tuple[str, str]]
    device_of: dict[int, str] = attrs.field(init=False)
    written: frozenset[int] = attrs.field(init=False)
    inputs: frozenset[int] = attrs.field(init=False)

    @device_of.default
    def _devices(self) -> dict[int, str]:
        return {d.node: d.device for d in self.placement.decisions}

    @written.default
    def _written_storages(self) -> frozenset[int]:
        nodes, source_of = self.context.graph.nodes, self.used
        return frozenset([storage_of(source_of(v)) for n in self.context.plan.nodes for v in nodes[n].writes])

    @inputs.default
    def _inputs(self) -> frozenset[int]:
        return frozenset(self.context.graph.inputs)

    def used(self, value: int) -> int:
        """Return the value that replaces `value` in the plan. Without a replacement, return `value` itself."""
        return self.context.plan.replace.get(value, value)

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Return the values that a device uses and other devices compute, by device."""
        wanted_on: dict[str, dict[int, None]] = defaultdict(dict)
        home, replace = self.placement.values, self.context.plan.replace
        for node_id in self.context.plan.nodes:
            device = self.device_of[node_id]
            for value in self.context.graph.nodes[node_id].inputs:
                source = replace.get(value, value) if replace else value
                if home[source] != device and source not in self.inputs:
                    wanted_on[device][source] = None
        return {device: tuple(values) for device, values in wanted_on.items()}

    def maker(self, value: int) -> Node | None:
        """Return the node that computes a value, or None if there is none or a second run may have another result."""
        node = self.context.graph.producer(value)
        if node is None or not repeatable(node):
            return None
        values = (*map(self.used, node.inputs), *node.outputs)
        return None if any(storage_of(v) in self.written for v in values) else node


class _Search:
    """Search backwards from the values that a device receives for nodes that it could run itself."""

    def __init__(self, fixed: _Decisions, device: str, results: tuple[int, ...]) -> None:
        self.fixed, self.device, self.wanted = fixed, device, results
        self.row = fixed.context.costs.by_device[device]
        self.sending: dict[int, float] = {}
        self.needs: dict[int, tuple[int, ...]] = {}

    def cone(self) -> Cone | None:
        """Return the nodes that the device could run, or None if there are none.

        A node is left out if it takes more than `MAX_COMPUTE_RATIO` times the time of all transfers to the device.
        """
        for value in self.wanted:
            self.sending[value] = self._sending_seconds(value)
        budget = MAX_COMPUTE_RATIO * sum(self.sending.values())
        pending = list(self.wanted)
        visited = set(pending)
        while pending and len(self.needs) < MAX_NODES:
            node = self.fixed.maker(pending.pop())
            if node is None or node.id in self.needs or not self._may_run(node, budget):
                continue
            self.needs[node.id] = missing = tuple(
                v for v in map(self.fixed.used, node.inputs) if not self._is_on_device(v)
            )
            for value in missing:
                if value not in visited:
                    visited.add(value)
                    self.sending[value] = self._sending_seconds(value)
                    pending.append(value)
        if not self.needs:
            return None
        nodes, row = self.fixed.context.graph.nodes, self.row
        makes = {n: nodes[n].outputs for n in self.needs}
        seconds = {n: row[n].seconds for n in self.needs}
        return Cone(self.device, self.wanted, makes, self.needs, self.sending, seconds, self.fixed.placement.values)

    def _may_run(self, node: Node, budget: float) -> bool:
        makes, home = self.fixed.makes, self.fixed.device_of.get(node.id)
        return home is not None and makes[home] == makes[self.device] and self.row[node.id].seconds <= budget

    def _is_on_device(self, value: int) -> bool:
        fixed = self.fixed
        is_copied = value in fixed.inputs and self.device in fixed.context.copies.get(value, ())
        return is_copied or fixed.placement.values[value] == self.device

    def _sending_seconds(self, value: int) -> float:
        context, home = self.fixed.context, self.fixed.placement.values[value]
        seconds = context.topology.link(home, self.device).transfer_seconds(context.graph.meta(value).nbytes)
        weight = value in self.fixed.inputs and context.profile.residency.get(value) is DataResidency.PERSISTENT_WEIGHT
        return seconds / AMORTIZING_RUNS if weight else seconds
