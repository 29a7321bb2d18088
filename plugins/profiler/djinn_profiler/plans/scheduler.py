"""`Scheduler`: schedules graphs without a session or a server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

import attrs

from djinn_core.errors import DoesNotFit
from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.hookspecs.optimizations import Optimization
from djinn_core.ir.costs import DeviceCapabilities, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.schedule import ExecutionSchedule, Run, SchedulingGroup
from djinn_core.logs import get_logger
from djinn_core.planning.builtins.costs import Roofline
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import PluginOverrides, Plugins, Request
from djinn_core.registry.registry import Registry
from djinn_profiler.plans.analysis_cache import AnalysisCache
from djinn_profiler.plans.cached_plans import planned

_log = get_logger("djinn.pipeline")
_ALONE = NetworkTopology((DeviceCapabilities("remote_accelerator:0", "unknown", "no server is connected"),))
_CAPACITY = 128


class Scheduler:
    """Create schedules of graphs, without a session. Thread-safe.

    The methods are *cost-aware* (all stages, all plugins), *basic* (the built-in placement and order, no plugins) and
    *minimal* (every node on the first device, in one step). If a method fails, it logs a warning and tries the next.
    """

    def __init__(
        self,
        network_topology: NetworkTopology = _ALONE,
        plugins: Plugins | None = None,
        placement_policy: str = "single",
        scheduler: str = "sequential",
        cost_estimator: CostModel | None = None,
    ) -> None:
        """Schedule for the devices of `network_topology`, with the given plugins, or with only the built-in plugins.

        `cost_estimator`: a cost model that takes precedence over the cost models of the plugins.
        """
        self.network_topology = network_topology
        self._plugins: Plugins = plugins or Registry(cost_models=(Roofline(),))
        if cost_estimator is not None:
            self._plugins = PluginOverrides(self._plugins, cost_models=(cost_estimator, *self._plugins.cost_models))
        self._request = Request(network_topology, placement_policy=placement_policy, scheduler=scheduler)
        self._lock = threading.Lock()
        self._cache = AnalysisCache(_CAPACITY)
        self._counts: Counter[str] = Counter()

    def create_schedule(self, graph: Graph, optimization_plan: OptimizationPlan | None = None) -> ExecutionSchedule:
        """Return the schedule of `graph`. With `optimization_plan`, it has only the nodes that run under this plan.

        Schedules are cached by the content of graph and plan.

        Raises:
            DoesNotFit: no device has enough memory or supports the graph's dtypes; the message names the reason, with
                figures.
        """
        return self._create(graph, optimization_plan)

    def add_optimization_strategy(self, optimization: Optimization) -> None:
        """Add an optimization that runs after the optimizations of the plugins, for later schedules."""
        optimizations = (*self._plugins.optimizations, optimization)
        self._plugins = PluginOverrides(self._plugins, optimizations=optimizations)

    def clear_cache(self) -> None:
        """Drop all cached schedules."""
        self._cache.clear()

    def get_stats(self) -> Mapping[str, int]:
        """Return hits and misses of the cache, and the number of schedules by each method."""
        with self._lock:
            return {name: self._counts[name] for name in ("hits", "misses", "cost_aware", "basic", "minimal")}

    def _create(self, graph: Graph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        methods: tuple[tuple[str, Callable[[], ExecutionSchedule]], ...] = (
            ("cost_aware", lambda: self._cost_aware(graph, optimization_plan)),
            ("basic", lambda: self._basic(graph, optimization_plan)),
        )
        failures: tuple[str, ...] = ()
        for (method, make), fallback in zip(methods, ("basic", "minimal"), strict=True):
            try:
                schedule = make()
            except DoesNotFit:  # the basic method would fail as well
                raise
            except Exception as error:
                _log.warning(
                    "a scheduling method failed",
                    way=method,
                    error=f"{type(error).__name__}: {error}",
                    instead=fallback,
                )
                failures += (f"{method} scheduling failed with {type(error).__name__}: {error}",)
                continue
            return self._with_reasons(method, schedule, failures)
        return self._with_reasons("minimal", self._minimal(graph, optimization_plan), failures)

    def _with_reasons(self, method: str, schedule: ExecutionSchedule, failures: tuple[str, ...]) -> ExecutionSchedule:
        if not failures:
            return schedule
        self._count(method)
        return attrs.evolve(schedule, reasons=(*failures, *schedule.reasons))

    def _count(self, *names: str) -> None:
        with self._lock:
            self._counts.update(names)

    def _cost_aware(self, graph: Graph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        result = planned(graph, self._plugins, self._request, self._cache, optimization_plan)
        self._count(*(("misses", "cost_aware") if result.seconds else ("hits",)))
        return _schedule_of(result)

    def _basic(self, graph: Graph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        return _schedule_of(plan(graph, Registry(), Request(self.network_topology), known_plan=optimization_plan))

    def _minimal(self, graph: Graph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        plan = optimization_plan or OptimizationPlan(tuple(node.id for node in graph.nodes))
        device = next((d.id for d in self.network_topology.devices), _ALONE.devices[0].id)
        return ExecutionSchedule(
            program=graph.program,
            groups=(SchedulingGroup(0, device, plan.nodes),),
            steps={device: (Run(plan.nodes),)},
            replace=plan.replace,
            equal_slots=plan.equal_slots,
            scheduler="minimal",
            reasons=("program order in one step, nothing freed before the end",),
        )


def _schedule_of(result: PipelineResult) -> ExecutionSchedule:
    if result.schedule is None:
        raise AssertionError("the plan has no schedule: the request needs until='schedule'")
    return result.schedule
