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
    """Facts that the plan of a program depends on: locations of its inputs and their copies, and the load of devices.

    `occupied`: bytes in use, by device id. `known`: facts about the inputs from earlier programs. `margin`: as in
    `PlacementContext`.
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
        factor, unsure: as in `Planning`.
        placements: trials of placements; None if the user chose the policy or no plugin judges.
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
    graph: Graph, registry: Registry, settings: Settings, topology: NetworkTopology, where: PlanningInputs
) -> PipelineResult:
    """Return the plan of a program for several devices.

    Raises:
        ConfigurationError: the setting `memory_limits` names a device that does not exist.
        InvalidStage: the devices cannot run the program within their limits.
    """
    limits = limits_of(settings, [device.id for device in topology.devices])
    topology, memory_limits = within(topology, limits, where.occupied)
    request = Request(
        topology,
        resident=where.resident,
        copies=where.copies,
        placement_policy=policy_for(settings, registry.placement_policies, len(topology.devices)),
        scheduler=settings.scheduler,
        exact=settings.exact,
        pins=settings.pins,
        memory_limits=memory_limits,
        latency_target=settings.latency_target,
        stream=where.stream,
        locate_recipe=where.locate_recipe,
        margin=where.margin,
        rewrite=rewrite,
    )
    # The memory that other programs use, and that allocators can reuse, is not known exactly.
    blind = attrs.evolve(request, topology=unmeasured(topology))
    try:
        return plan(graph, registry, request, known=where.known)
    except InvalidStage as error:
        if (isinstance(error, DoesNotFit) and error.excluded_by_pins) or not (
            memory_limits or isinstance(error, DoesNotFit)
        ):
            raise
        last_error = error
    if memory_limits:
        _log.warning("no plan fits the memory limits", error=str(last_error), instead="one without optimizations")
        return plan(graph, PluginOverrides(registry, optimizations=()), blind, known=where.known)
    instead = "free memory and missing features of devices are ignored; executors report errors"
    _log.warning("a program may not fit", error=str(last_error), instead=instead)
    anywhere = attrs.evolve(blind, topology=supporting_all_ops(blind.topology))
    return _first_that_fits(lambda asked: plan(graph, registry, asked, known=where.known), blind, anywhere)


def _first_that_fits(make: Callable[[Request], PipelineResult], request: Request, other: Request) -> PipelineResult:
    try:
        return make(request)
    except DoesNotFit:
        return make(other)
