"""A pool of executors, from connections to a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from djinn_core.config import Settings
from djinn_core.ir.costs import DeviceCapabilities, NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.result import PipelineResult
from djinn_core.runtime.connecting.opened import Opened
from djinn_core.runtime.observing import Observers
from djinn_core.runtime.planning.constraints import limits_of, within
from djinn_core.runtime.planning.planner import Planner
from djinn_core.runtime.planning.planning import capabilities_of
from djinn_core.runtime.pool.held_uploads import HeldUploads
from djinn_core.runtime.pool.introductions import Introductions
from djinn_core.runtime.pool.links import PresentLinks
from djinn_core.runtime.pool.planner import PoolPlanner, Whereabouts
from djinn_core.runtime.pool.relay import Relay, look_after_each_other
from djinn_core.runtime.pool.residency import Residency
from djinn_core.runtime.pool.routes import Routes
from djinn_core.runtime.pool.session import PoolSession
from djinn_core.runtime.receiving.answers import AnswerReader
from djinn_core.runtime.receiving.failures import Failures
from djinn_core.runtime.session import Session
from djinn_core.runtime.stats import Stats

PlanOnTopology = Callable[[ProgramGraph, Whereabouts, NetworkTopology], PipelineResult]


def open_pool(
    opened: Sequence[Opened],
    settings: Settings,
    planner: Planner,
    plan: PlanOnTopology,
    stats: Stats,
    observers: Observers,
) -> PoolSession:
    """One session over several executors; the links between them are measured.

    Raises:
        ConfigurationError: a limit of memory is for a device that there is not.
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
            caches_weights=one.attached.caches_weights,
            compressions=one.compressions,
            weight_sources=one.attached.weight_sources,
            called=one.server,
            reader=AnswerReader(failures, number),
            unread=1,  # what an executor says of its links counts for the next plan
        )
        for number, one in enumerate(opened, 1)
    ]
    for number, member in enumerate(members, 1):
        failures.read_by(number, member.replies.receive_until)
    look_after_each_other(members)
    relays = [Relay(member) for member in members]
    routes = Routes(members, relays, observers)
    capabilities = capabilities_named(opened)
    devices = tuple(device.id for device in capabilities)
    limits = limits_of(settings, devices)
    links = PresentLinks(relays, capabilities, routes.links(devices))
    pool_planner = PoolPlanner(
        lambda graph, where: plan(graph, where, links.topology),
        devices,
        stats,
        residency,
        planner,
    )
    pool_planner.know_devices(capabilities)
    pool_planner.memory = _memory_free(capabilities, limits)
    uploads = HeldUploads(members, pool_planner.memory, residency)

    def note_room(devices: tuple[DeviceCapabilities, ...]) -> None:
        pool_planner.memory = _memory_free(devices, limits)
        uploads.fill(pool_planner.memory)

    links.when_room_changed = note_room
    connections, urls = [one.connection for one in opened], [one.url for one in opened]
    introductions = Introductions(connections, urls, [one.attached.instance for one in opened], routes.pairs_of)
    return PoolSession(members, pool_planner, residency, routes, uploads, links, introductions)


def capabilities_named(opened: Sequence[Opened]) -> tuple[DeviceCapabilities, ...]:
    """The devices of the sessions, by the names that they have in plans, with what was measured of them."""
    infos = enumerate(one.attached.device for one in opened)
    return tuple(attrs.evolve(capabilities_of(info), id=f"{number}/{info.id}") for number, info in infos)


def _memory_free(devices: tuple[DeviceCapabilities, ...], limits: Mapping[str, int]) -> list[int | None]:
    topology, _ = within(NetworkTopology(devices), limits, {})
    return [device.memory_free for device in topology.devices]
