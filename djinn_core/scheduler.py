"""`Scheduler`: schedules for graphs, without a session and without a server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping

import attrs

from djinn_core.builtins.costs import Roofline
from djinn_core.builtins.placement import FirstFit, SingleDevice
from djinn_core.builtins.scheduling import Sequential
from djinn_core.errors import DoesNotFit
from djinn_core.hookspecs.placement import PlacementContext
from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.costs import Costs, DeviceCapabilities, NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.schedule import ExecutionSchedule, Run, SchedulingGroup
from djinn_core.logs import get_logger
from djinn_core.lru import LruCache
from djinn_core.pipeline import Plugins, Request, plan
from djinn_core.plugins.registry import Registry
from djinn_core.stages.annotate import annotate
from djinn_core.stages.place import place

_log = get_logger("djinn.pipeline")
_ALONE = NetworkTopology((DeviceCapabilities("remote_accelerator:0", "unknown", "no server is connected"),))
_CAPACITY = 128


@attrs.frozen
class _Made:
    """A schedule, and what it was made from: that stays, so that its id is not given to something else."""

    graph: ProgramGraph
    plan: OptimizationPlan | None
    schedule: ExecutionSchedule


class Scheduler:
    """Makes schedules: with costs and plugins where they work, in program order where they do not. For any number of threads.

    Three ways, each taken when the one before failed, with a warning that names what failed: *cost-aware* (all stages, all
    plugins), *basic* (the built-in placement and order, no plugins), *minimal* (every node on the first device, in one
    step).
    """

    def __init__(
        self,
        network_topology: NetworkTopology = _ALONE,
        plugins: Plugins | None = None,
        placement_policy: str = "single",
        scheduler: str = "sequential",
    ) -> None:
        """Schedule for the devices of `network_topology`, with the given plugins or the built-in ones alone."""
        self.network_topology = network_topology
        self._plugins: Plugins = plugins or Registry(cost_models=(Roofline(),))
        self._request = Request(network_topology, placement_policy=placement_policy, scheduler=scheduler)
        self._lock = threading.Lock()
        self._cache: LruCache[Hashable, _Made] = LruCache(_CAPACITY)
        self._counts: Counter[str] = Counter()

    def create_schedule(
        self, graph: ProgramGraph, optimization_plan: OptimizationPlan | None = None
    ) -> ExecutionSchedule:
        """The schedule of `graph`; with `optimization_plan`, of what that plan leaves of it.

        Asked again for the same graph and plan, it answers from its cache.

        Raises:
            DoesNotFit: no device has room for it, or the dtypes that it needs; the message has the figures.
        """
        key = (id(graph.program), id(optimization_plan))
        with self._lock:
            found = self._cache.use(key)
            self._counts["hits" if found else "misses"] += 1
            if found is not None:
                return found.schedule
        schedule = self._create(graph, optimization_plan)
        with self._lock:
            self._cache.store(key, _Made(graph, optimization_plan, schedule))
        return schedule

    def statistics(self) -> Mapping[str, int]:
        """Hits and misses of the cache, and schedules made by each way."""
        with self._lock:
            return {name: self._counts[name] for name in ("hits", "misses", "cost_aware", "basic", "minimal")}

    def _create(self, graph: ProgramGraph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        ways: tuple[tuple[str, Callable[[], ExecutionSchedule]], ...] = (
            ("cost_aware", lambda: self._cost_aware(graph, optimization_plan)),
            ("basic", lambda: self._basic(graph, optimization_plan)),
        )
        failed: tuple[str, ...] = ()
        for (way, make), instead in zip(ways, ("basic", "minimal"), strict=True):
            try:
                schedule = make()
            except DoesNotFit:  # nor would it if less were known
                raise
            except Exception as error:
                _log.warning(
                    "a scheduler's result is not used",
                    way=way,
                    error=f"{type(error).__name__}: {error}",
                    instead=instead,
                )
                failed += (f"{way} scheduling failed with {type(error).__name__}: {error}",)
                continue
            return self._counted(way, schedule, failed)
        return self._counted("minimal", self._minimal(graph, optimization_plan), failed)

    def _counted(self, way: str, schedule: ExecutionSchedule, failed: tuple[str, ...]) -> ExecutionSchedule:
        with self._lock:
            self._counts[way] += 1
        return attrs.evolve(schedule, reasons=(*failed, *schedule.reasons)) if failed else schedule

    def _cost_aware(self, graph: ProgramGraph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        result = plan(graph, self._plugins, self._request, known_plan=optimization_plan)
        if result.schedule is None:  # cannot be: the request goes as far as the schedule
            raise AssertionError
        return result.schedule

    def _basic(self, graph: ProgramGraph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        chosen = optimization_plan or _everything(graph)
        where = PlacementContext(graph, _blank_profile(graph), chosen, Costs({}), self.network_topology, {})
        single = SingleDevice()
        placement = place(where, single, single, FirstFit())
        context = SchedulingContext(graph.program, graph, chosen, placement, Costs({}), self.network_topology)
        return Sequential().schedule(context)

    def _minimal(self, graph: ProgramGraph, optimization_plan: OptimizationPlan | None) -> ExecutionSchedule:
        chosen = optimization_plan or _everything(graph)
        device = next((d.id for d in self.network_topology.devices), _ALONE.devices[0].id)
        return ExecutionSchedule(
            program=graph.program,
            groups=(SchedulingGroup(0, device, chosen.nodes),),
            steps={device: (Run(chosen.nodes),)},
            replace=chosen.replace,
            equal_slots=chosen.equal_slots,
            scheduler="minimal",
            reasons=("program order in one step, nothing freed before the end",),
        )


def _everything(graph: ProgramGraph) -> OptimizationPlan:
    return OptimizationPlan(tuple(node.id for node in graph.nodes))


def _blank_profile(graph: ProgramGraph) -> WorkloadProfile:
    return annotate(graph, ())
