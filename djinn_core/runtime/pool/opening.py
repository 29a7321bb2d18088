"""A pool of executors, from connections to a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.result import PipelineResult
from djinn_core.runtime.connect import Opened
from djinn_core.runtime.failures import Failures
from djinn_core.runtime.observing import Observers
from djinn_core.runtime.planner import Planner
from djinn_core.runtime.planning import capabilities_of
from djinn_core.runtime.pool.held_uploads import HeldUploads
from djinn_core.runtime.pool.links import PresentLinks
from djinn_core.runtime.pool.planner import PoolPlanner, Whereabouts
from djinn_core.runtime.pool.residency import Residency
from djinn_core.runtime.pool.routes import Routes
from djinn_core.runtime.pool.session import PoolSession
from djinn_core.runtime.session import Session
from djinn_core.runtime.stats import Stats

PlanOnTopology = Callable[[ProgramGraph, Whereabouts, NetworkTopology], PipelineResult]


def open_pool(
    opened: Sequence[Opened], planner: Planner, plan: PlanOnTopology, stats: Stats, observers: Observers
) -> PoolSession:
    """One session over several executors; the links between them are measured.

    Raises:
        SessionLost: an executor is gone already.
    """
    failures, residency = Failures(), Residency()
    members = [
        Session(
            one.connection,
            planner,
            stats,
            one.url,
            observers,
            one.attached.recalls,
            one.attached.codings,
            number,
            failures,
        )
        for number, one in enumerate(opened, 1)
    ]
    routes = Routes(members)
    infos = [one.attached.device for one in opened]
    devices = tuple(f"{number}/{info.id}" for number, info in enumerate(infos))
    capabilities = tuple(attrs.evolve(capabilities_of(i), id=name) for i, name in zip(infos, devices, strict=True))
    links = PresentLinks(members, capabilities, routes.links(devices))
    pool_planner = PoolPlanner(
        lambda graph, where: plan(graph, where, links.topology), devices, stats, residency, planner.exact
    )
    uploads = HeldUploads(members, [info.memory_free for info in infos])
    return PoolSession(members, pool_planner, residency, routes, uploads, links)
