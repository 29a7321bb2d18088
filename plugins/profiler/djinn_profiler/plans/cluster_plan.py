"""The planner as a library: plan a graph for a described cluster, without a device, a session or a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import DataResidency, WorkloadProfile
from djinn_core.ir.result import PipelineResult
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import PluginOverrides, Plugins, Request, preferred
from djinn_core.planning.stages.simulate import Timeline, simulated
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, open_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import resolve

_KINDS = frozenset({"patterns", "cost_models", "optimizations", "placement_policies", "schedulers"})


@attrs.define(slots=False)
class ClusterPlan:
    """Plans for the first run, which uploads weights and caches, and for later runs, which find them on their devices.

    Attributes:
        first: the plan of the first run.
        result: the plan of each later run.
        resident: device of each weight and cache after the first run, as in `Request.resident`.
        copies: further devices that have copies of a weight or cache, as in `Request.copies`.
    """

    first: PipelineResult
    result: PipelineResult
    resident: Mapping[int, str]
    copies: Mapping[int, tuple[str, ...]]

    @cached_property
    def first_timeline(self) -> Timeline:
        """Return the simulated first run."""
        return simulated(self.first)

    @cached_property
    def timeline(self) -> Timeline:
        """Return a simulated later run: its seconds, and the work of each device and link."""
        return simulated(self.result, resident=self.resident, copies=self.copies)


def planning_plugins(**settings: Any) -> Registry:
    """Return the planning plugins that settings and the environment select.

    `**settings`: settings of `djinn.configure`, such as `plugin_settings={"cleanup": {"on": True}}`.
    """
    settings_in_use = resolve(settings).settings
    return open_registry(Selection.from_settings(settings_in_use), builtins=builtin_plugins(), kinds=_KINDS)


def plan_for_cluster(
    graph: Graph,
    topology: NetworkTopology,
    plugins: Plugins | None = None,
    *,
    policy: str = "",
    scheduler: str = "",
    profile: WorkloadProfile | None = None,
    **request: Any,
) -> ClusterPlan:
    """Return a plan of a graph for described devices. Nothing is computed.

    Args:
        graph: a captured program, or the result of `fx_graph` for an exported or traced module.
        topology: devices and links, for example from `read_cluster`.
        plugins: by default the installed plugins.
        policy: name of the placement policy; by default the preferred policy for several devices.
        scheduler: name of the scheduler; by default the preferred scheduler for several devices.
        profile: the graph's profile, if known.
        **request: other fields of `Request`, such as `exact`.

    Raises:
        ConfigurationError: the policy or scheduler does not exist.
        InvalidStage: the cluster cannot run the graph; the message says why, with figures.
    """
    plugins = plugins or planning_plugins()
    policy = policy or preferred(plugins.placement_policies, "single")
    scheduler = scheduler or preferred(plugins.schedulers, "sequential")
    plan_request = Request(topology, placement_policy=policy, scheduler=scheduler, **request)
    first = plan(graph, plugins, plan_request, profile=profile)
    placement, known_profile = first.placement, first.profile
    if placement is None or known_profile is None:
        raise ValueError("a plan for a cluster needs until='schedule'")
    uploads = {v for v in first.graph.inputs if known_profile.residency.get(v) is DataResidency.INPUT}
    resident = {v: placement.values[v] for v in first.graph.inputs if v not in uploads}
    copies = {v: devices for v, devices in placement.copies.items() if v in resident}
    results, hints = (first.plan.results, first.plan.hints) if first.plan is not None else ((), {})
    applied_optimizations = {result.optimization for result in results if result.rewrite.substitutions}
    remaining = PluginOverrides(
        plugins, optimizations=tuple(o for o in plugins.optimizations if o.name not in applied_optimizations)
    )
    groups = {"groups": hints["groups"]} if applied_optimizations and "groups" in hints else plan_request.hints
    warm = attrs.evolve(plan_request, resident=resident, copies=copies, hints=groups)
    program: Any = first.graph  # with the replacements that those optimizations made
    return ClusterPlan(first, plan(program, remaining, warm, profile=known_profile), resident, copies)
