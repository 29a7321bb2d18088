"""A pool of executors, from connections to a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.observing import Observers
from djinn_client.runtime.planning.planner import Planner
from djinn_client.runtime.pool.executors import PoolExecutors
from djinn_client.runtime.pool.held_uploads import HeldUploads
from djinn_client.runtime.pool.membership import Membership
from djinn_client.runtime.pool.peer_reconnection import PeerReconnection
from djinn_client.runtime.pool.pool_planner import PlanningInputs, PoolPlanner
from djinn_client.runtime.pool.pool_session import PoolSession
from djinn_client.runtime.pool.relay import Relay
from djinn_client.runtime.pool.routes import Routes
from djinn_client.runtime.pool.topology import PoolTopology
from djinn_client.runtime.pool.value_locations import ValueLocations
from djinn_client.runtime.receiving.failures import Failures
from djinn_client.runtime.session import Session
from djinn_client.runtime.stats import Stats
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.result import PipelineResult
from djinn_core.settings import Settings

PlanOnTopology = Callable[[ProgramGraph, PlanningInputs, NetworkTopology], PipelineResult]


def open_pool(
    opened: Sequence[OpenSession],
    settings: Settings,
    planner: Planner,
    plan: PlanOnTopology,
    stats: Stats,
    observers: Observers,
    only: Session | None = None,
) -> PoolSession:
    """One session over several executors; the links between them are measured.

    `only`: the session with the first of them, which was the only one so far.

    Raises:
        ConfigurationError: a limit of memory is for a device that there is not.
        SessionLost: an executor is gone already.
    """
    membership, locations = Membership(), ValueLocations()
    relays: list[Relay] = []
    routes = Routes(membership, relays, observers)
    links = PoolTopology(relays, (), ())
    pool_planner = PoolPlanner(lambda graph, where: plan(graph, where, links.topology), stats, locations, planner)
    uploads = HeldUploads(membership, (), locations)
    peer_reconnection = PeerReconnection(routes.pairs_of)
    failures = only.replies.reader.failures if only is not None else Failures()
    parts = (membership, relays, locations, pool_planner, routes, links, uploads, peer_reconnection)
    executors = PoolExecutors(settings, planner, stats, observers, failures, *parts)
    pool = PoolSession(executors)
    if only is None:
        executors.join(opened)
    else:
        executors.adopt(only, opened[0], opened[1:])
    return pool
