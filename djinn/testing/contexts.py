"""Make sample contexts for plugins, as the earlier planning stages would make them."""

from __future__ import annotations

from djinn_core.hookspecs.optimizations import OptimizationContext
from djinn_core.hookspecs.placement_policies import PlacementContext
from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.costs import CostEstimate, Costs, DeviceCapabilities, Link, NetworkTopology
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import RANDOM_STATE, storage_of
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.profile import ExecutionPhase, Modality, WorkloadProfile, WorkloadType

_GIGABYTE = 1 << 30


def topology(devices: int = 1) -> NetworkTopology:
    """Return a topology of one client and `devices` equal devices, with a link between any two."""
    names = [f"server/cpu:{index}" for index in range(devices)]
    capable = tuple(
        DeviceCapabilities(name, "cpu", memory=16 * _GIGABYTE, memory_free=8 * _GIGABYTE, flops=1e11, bandwidth=2e10)
        for name in names
    )
    ends = ["client", *names]
    links = tuple(Link(source, target, 1e9, 1e-4) for source in ends for target in ends if source != target)
    return NetworkTopology(capable, links)


def costs(graph: Graph, devices: NetworkTopology) -> Costs:
    """Return costs of one microsecond per node on each device."""
    row = tuple(CostEstimate(1.0, 1, 1, 1e-6, "sample") for _ in graph.nodes)
    return Costs({device.id: row for device in devices.devices})


def profile(graph: Graph) -> WorkloadProfile:
    """Return a profile without recognised patterns."""
    count = len(graph.nodes)
    return WorkloadProfile(
        WorkloadType.GENERIC, (ExecutionPhase.FORWARD,) * count, (Modality.UNKNOWN,) * count, {}, {}, ()
    )


def plan(graph: Graph) -> OptimizationPlan:
    """Return a plan in which every node runs."""
    return OptimizationPlan(tuple(node.id for node in graph.nodes))


def optimization_context(graph: Graph, devices: int = 1) -> OptimizationContext:
    """Return the context of the first optimization.

    Inputs and all values that the program does not drop outlive the program.
    """
    network = topology(devices)
    kept_values = frozenset((*graph.inputs, *graph.outputs))
    return OptimizationContext(graph, profile(graph), costs(graph, network), network, plan(graph), kept_values)


def placement_context(graph: Graph, devices: int = 1) -> PlacementContext:
    """Return a context for a placement policy. No input has a location yet."""
    network = topology(devices)
    return PlacementContext(graph, profile(graph), plan(graph), costs(graph, network), network, {})


def scheduling_context(graph: Graph, devices: int = 1) -> SchedulingContext:
    """Return a context for a scheduler. Work is spread over the devices as evenly as shared memory allows."""
    network = topology(devices)
    return SchedulingContext(graph.program, graph, plan(graph), spread(graph, network), costs(graph, network), network)


def spread(graph: Graph, network: NetworkTopology) -> Placement:
    """Return a placement that assigns storages to the devices round-robin.

    Storages that one op writes share a device, and so does the state of all random generators.
    """
    groups: dict[int, int] = {}

    def leader(storage: int) -> int:
        while groups.setdefault(storage, storage) != storage:
            storage = groups[storage]
        return storage

    for node in graph.nodes:
        for storage in _storages_of(node):
            groups[leader(storage)] = leader(_storages_of(node)[0])
    values = [*graph.inputs, *(value for node in graph.nodes for value in node.outputs)]
    leaders = list(dict.fromkeys(leader(storage_of(value)) for value in values))
    homes = {storage: network.devices[i % len(network.devices)].id for i, storage in enumerate(leaders)}
    first = network.devices[0].id

    def home(node: Node) -> str:
        return homes.get(leader(_storages_of(node)[0]), first) if _storages_of(node) else first

    decisions = tuple(PlacementDecision(node.id, home(node), "round-robin") for node in graph.nodes)
    return Placement(decisions, {value: homes[leader(storage_of(value))] for value in values}, "spread")


def _storages_of(node: Node) -> list[int]:
    """Return the numbers of the storages that must be on the device of a node: those of its outputs and writes."""
    return [*([RANDOM_STATE] if node.random else []), *map(storage_of, (*node.outputs, *node.writes))]
