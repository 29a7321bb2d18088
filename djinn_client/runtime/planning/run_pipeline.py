"""Planning on the client: runs the pipeline's stages for the connected devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from djinn_client.interception.recording.substitute import rewrite
from djinn_client.runtime.planning.calibrations import calibration_of
from djinn_client.runtime.planning.constraints import NOT_OCCUPIED, limits_of, policy_for, within
from djinn_core.errors import DoesNotFit
from djinn_core.ir.costs import DeviceCapabilities, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationResult
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult, Stage
from djinn_core.logs import get_logger
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import PluginOverrides, Plugins, Request
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings
from djinn_core.wire.messages import DeviceInfo

# Device for planning before a server is known, as in `djinn.capture()`.
NOWHERE = DeviceInfo(id="remote_accelerator:0", kind="unknown", name="no server is connected")

_log = get_logger("djinn.runtime")
NOTHING_LEFT_OUT: Mapping[str, str] = {}


def topology_of(device: DeviceInfo) -> NetworkTopology:
    """Return the topology of a single device."""
    return NetworkTopology((capabilities_of(device),))


def capabilities_of(device: DeviceInfo) -> DeviceCapabilities:
    """Return the capabilities of an executor's device, as reported and measured."""
    return DeviceCapabilities(
        device.id,
        device.kind,
        device.name,
        device.memory,
        device.memory_free,
        device.flops,
        device.bandwidth,
        calibration=calibration_of(device),
        dtypes=frozenset(device.dtypes),
        unsupported=frozenset(device.unsupported),
        spill=device.spill,
    )


def plan_program(
    program: Program | Graph,
    registry: Registry,
    settings: Settings,
    device: DeviceInfo,
    until: Stage = "schedule",
    without: Mapping[str, str] = NOTHING_LEFT_OUT,
    make: Callable[[Graph, Plugins, Request], PipelineResult] = plan,
) -> PipelineResult:
    """Plan a program for one device, up to the stage `until`.

    Args:
        program: the program.
        registry: plugins in use.
        settings: settings in force.
        device: the device.
        until: last stage to run.
        without: optimizations to exclude, each with the reason.
        make: runs the pipeline's stages, with or without a cache.
    """
    graph = program if isinstance(program, Graph) else Graph(program)
    # A single device leaves no choice. The executor reports missing ops and memory, op by op.
    topology = unmeasured(supporting_all_ops(topology_of(device)))
    topology, memory_limits = within(topology, limits_of(settings, [device.id]), NOT_OCCUPIED)
    request = Request(
        topology,
        resident=dict.fromkeys(graph.inputs, device.id),  # uploads are sent before the programs that use them
        until=until,
        placement_policy=policy_for(settings, registry.placement_policies, 1),
        scheduler=settings.scheduler,
        exact=settings.exact,
        memory_limits=memory_limits,
        latency_target=settings.latency_target,
        rewrite=rewrite,
    )
    plugins: Plugins = registry
    if without:
        plugins = PluginOverrides(
            registry, optimizations=tuple(o for o in registry.optimizations if o.name not in without)
        )
    try:
        result = make(graph, plugins, request)
    except DoesNotFit as error:
        if memory_limits:
            raise
        _log.warning(
            "a program may not fit", error=str(error), instead="ops that run out of memory raise OutOfMemoryError"
        )
        request = attrs.evolve(request, topology=unmeasured(topology, total=True))
        result = make(graph, plugins, request)
    return with_reasons(result, without)


def with_reasons(result: PipelineResult, without: Mapping[str, str]) -> PipelineResult:
    """Return `result` with a not-applied result for each excluded optimization in `without`."""
    if not without or result.plan is None:
        return result
    excluded = [OptimizationResult(name, applied=False, reason=reason) for name, reason in without.items()]
    return attrs.evolve(result, plan=attrs.evolve(result.plan, results=(*result.plan.results, *excluded)))


def supporting_all_ops(topology: NetworkTopology) -> NetworkTopology:
    """Return the devices as if they supported all dtypes and ops."""
    devices = tuple(attrs.evolve(d, dtypes=frozenset(), unsupported=frozenset()) for d in topology.devices)
    return topology if devices == topology.devices else attrs.evolve(topology, devices=devices)


def unmeasured(topology: NetworkTopology, *, total: bool = False) -> NetworkTopology:
    """Return `topology` with unknown free memory. `total`: True to make the devices' total memory unknown, too."""
    devices = tuple(attrs.evolve(d, memory_free=None, memory=0 if total else d.memory) for d in topology.devices)
    return topology if devices == topology.devices else attrs.evolve(topology, devices=devices)
