"""The planner as a library: plan a graph for a cluster that is only described, without a device, a session or a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import ProgramGraph
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
    """A plan for a run in which weights and caches are in their places, and for the run before it, which uploads them.

    Attributes:
        first: the plan of the first run.
        result: the plan of each later run.
        resident, copies: where its inputs are, as in `Request`.
    """

    first: PipelineResult
    result: PipelineResult
    resident: Mapping[int, str]
    copies: Mapping[int, tuple[str, ...]]

    @cached_property
    def first_timeline(self) -> Timeline:
        """The simulated first run."""
        return simulated(self.first)

    @cached_property
    def timeline(self) -> Timeline:
        """A simulated later run: its seconds, and what each device and link does."""
        return simulated(self.result, resident=self.resident, copies=self.copies)


def planning_plugins(**settings: Any) -> Registry:
    """Return the plugins that planning asks, as the settings in the environment select them, and those given here.

    Args:
        **settings: as `djinn.configure` takes them, such as `plugin_settings={"cleanup": {"on": True}}`.
    """
    found = resolve(settings).settings
    return open_registry(Selection.from_settings(found), builtins=builtin_plugins(), kinds=_KINDS)


def plan_for_cluster(
    graph: ProgramGraph,
    topology: NetworkTopology,
    plugins: Plugins | None = None,
    *,
    policy: str = "",
    scheduler: str = "",
    profile: WorkloadProfile | None = None,
    **request: Any,
) -> ClusterPlan:
    """Plan a graph for described devices. Nothing is computed.

    Args:
        graph: a captured program, or what `fx_graph` makes of an exported or traced module.
        topology: devices and links, such as `read_cluster` reads.
        plugins: by default those that are installed.
        policy: name of the placement policy; by default the one preferred for several devices.
        scheduler: name of the scheduler; by default the one preferred for several devices.
        profile: of the graph, if it is known.
        **request: other fields of `Request`, such as `exact`.

    Raises:
        ConfigurationError: there is no such policy or scheduler.
        InvalidStage: the cluster cannot run the graph; the message has the figures.
    """
    plugins = plugins or planning_plugins()
    policy = policy or preferred(plugins.placement_policies, "single")
    scheduler = scheduler or preferred(plugins.schedulers, "sequential")
    asked = Request(topology, placement_policy=policy, scheduler=scheduler, **request)
    first = plan(graph, plugins, asked, profile=profile)
    placement, known = first.placement, first.profile
    if placement is None or known is None:
        raise ValueError("a plan for a cluster needs until='schedule'")
    coming = {v for v in first.graph.inputs if known.residency.get(v) is DataResidency.INPUT}
    resident = {v: placement.values[v] for v in first.graph.inputs if v not in coming}
    copies = {v: held for v, held in placement.copies.items() if v in resident}
    results, hints = (first.plan.results, first.plan.hints) if first.plan is not None else ((), {})
    done = {result.optimization for result in results if result.rewrite.substitutions}
    rest = PluginOverrides(plugins, optimizations=tuple(o for o in plugins.optimizations if o.name not in done))
    groups = {"groups": hints["groups"]} if done and "groups" in hints else asked.hints
    warm = attrs.evolve(asked, resident=resident, copies=copies, hints=groups)
    program: Any = first.graph  # with what those optimizations put in its place
    return ClusterPlan(first, plan(program, rest, warm, profile=known), resident, copies)
