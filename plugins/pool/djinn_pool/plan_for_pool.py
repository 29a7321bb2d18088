"""Plan programs for several devices."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import attrs

from djinn_client.interception.recording.substitute import rewrite
from djinn_client.runtime.context import ClientContext
from djinn_client.runtime.planning.constraints import MemoryInUse, limits_of, policy_for, within
from djinn_client.runtime.planning.run_pipeline import supporting_all_ops, unmeasured
from djinn_core.errors import DoesNotFit, InvalidStage
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import MARGIN
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.stream import ALONE, Stream
from djinn_core.ir.substitution import RecipeLookup, no_recipe_locations
from djinn_core.logs import get_logger
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import PluginOverrides, Request
from djinn_core.planning.stages.annotate import Known
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings
from djinn_pool.placement_trials import PlacementTrials

_log = get_logger("djinn.runtime")


@attrs.frozen
class PlanningInputs:
    """Facts that the plan of a program depends on. Devices are given by their id.

    Attributes:
        resident: device of each input's memory.
        copies: further devices with copies of inputs.
        stream: pending programs of the same structure, and the executor that load balancing proposes.
        locate_recipe: function that finds the locations of values derived from weights.
        occupied: bytes in use on each device.
        known: `DataResidency` or `Modality` of inputs, as found in earlier programs.
        margin: share of the time that several devices must be predicted to save before a policy uses them.
    """

    resident: Mapping[int, str]
    copies: Mapping[int, tuple[str, ...]]
    stream: Stream = ALONE
    locate_recipe: RecipeLookup = attrs.field(default=no_recipe_locations, eq=False)
    occupied: Mapping[str, MemoryInUse] = attrs.field(factory=dict)
    known: Known = attrs.field(factory=dict)
    margin: float = MARGIN


@attrs.frozen
class PoolRules:
    """Settings for plans of a pool.

    Attributes:
        factor: ratio of sizes up to which a plan is reused, as in `Planning`.
        unsure: ops whose results plans must check, as in `Planning`.
        placements: trials of placements, or None if the user chose the policy or no plugin judges trials.
        learns_margin: True if wrong predictions raise the required saving.
    """

    factor: int
    unsure: Container[str]
    placements: PlacementTrials | None = None
    learns_margin: bool = False


def rules_for(context: ClientContext) -> PoolRules:
    """Return the settings for the plans of a session."""
    registry, settings = context.configured()
    assert context.planner is not None
    planning = context.planner.planning
    if settings.placement_policy:  # an explicitly named policy is followed without trials
        return PoolRules(planning.factor, planning.unsure)
    trials = None
    if planning.judge is not None:
        name = policy_for(settings, registry.placement_policies, 2)
        trials = PlacementTrials(planning.judge, name, context.stats, context.planner.verdicts)
    return PoolRules(planning.factor, planning.unsure, trials, learns_margin=True)


def plan_for_pool(
    graph: Graph, registry: Registry, settings: Settings, topology: NetworkTopology, inputs: PlanningInputs
) -> PipelineResult:
    """Return the plan of a program for several devices.

    Args:
        graph: the program.
        registry: plugins of the stages.
        settings: settings of the session.
        topology: devices and links.
        inputs: facts about the program's inputs and the devices' load.

    Raises:
        ConfigurationError: the setting `memory_limits` names a device that does not exist.
        InvalidStage: the devices cannot run the program within their limits.
    """
    limits = limits_of(settings, [device.id for device in topology.devices])
    topology, memory_limits = within(topology, limits, inputs.occupied)
    request = Request(
        topology,
        resident=inputs.resident,
        copies=inputs.copies,
        placement_policy=policy_for(settings, registry.placement_policies, len(topology.devices)),
        scheduler=settings.scheduler,
        exact=settings.exact,
        pins=settings.pins,
        memory_limits=memory_limits,
        latency_target=settings.latency_target,
        stream=inputs.stream,
        locate_recipe=inputs.locate_recipe,
        margin=inputs.margin,
        rewrite=rewrite,
    )
    # The free memory is uncertain, because other programs use memory and allocators reuse memory.
    blind = attrs.evolve(request, topology=unmeasured(topology))
    try:
        return plan(graph, registry, request, known=inputs.known)
    except InvalidStage as error:
        if (isinstance(error, DoesNotFit) and error.excluded_by_pins) or not (
            memory_limits or isinstance(error, DoesNotFit)
        ):
            raise
        last_error = error
    if memory_limits:
        _log.warning(
            "no plan fits the memory limits, planning without optimizations and without the measured free memory",
            error=str(last_error),
        )
        return plan(graph, PluginOverrides(registry, optimizations=()), blind, known=inputs.known)
    _log.warning(
        "a program may not fit, planning again without regard to free memory, and then without regard to unsupported features",
        error=str(last_error),
    )
    anywhere = attrs.evolve(blind, topology=supporting_all_ops(blind.topology))
    return _first_that_fits(lambda request: plan(graph, registry, request, known=inputs.known), blind, anywhere)


def _first_that_fits(make: Callable[[Request], PipelineResult], request: Request, fallback: Request) -> PipelineResult:
    try:
        return make(request)
    except DoesNotFit:
        return make(fallback)
