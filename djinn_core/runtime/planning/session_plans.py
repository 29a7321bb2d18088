"""Plans of the open session, and what is known of the programs that were planned in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from djinn_core.config import Settings
from djinn_core.interception.recording import recorder
from djinn_core.interception.runtime_interface import port
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.pipeline import asked_by_size
from djinn_core.plugins.registry import Registry
from djinn_core.runtime.planning.ab_tests import Without, judge_among
from djinn_core.runtime.planning.constraints import policy_for
from djinn_core.runtime.planning.planner import Planner
from djinn_core.runtime.planning.planning import NOTHING_LEFT_OUT, NOWHERE, plan_for_pool, plan_program
from djinn_core.runtime.planning.program_index import WholePrograms
from djinn_core.runtime.planning.residency_history import EarlierPrograms
from djinn_core.runtime.planning.size_range import FACTOR, NARROW_FACTOR
from djinn_core.runtime.planning.value_hints import tell_meaning
from djinn_core.runtime.pool.planner import Whereabouts
from djinn_core.runtime.pool.session import PoolSession
from djinn_core.runtime.sending.template import Prepared
from djinn_core.runtime.session import Session
from djinn_core.runtime.state import state
from djinn_core.stages.fingerprint import tolerates_growth


def _configured() -> tuple[Registry, Settings]:
    assert state.registry is not None, "a session is open"
    assert state.settings is not None, "a session is open"
    return state.registry, state.settings


def asked_by_size_in(registry: Registry, settings: Settings, devices: int) -> tuple[str, ...]:
    """Plugins in use for programs on so many devices that have plans made anew where sizes change much."""
    policy = policy_for(settings, registry.placement_policies, devices)
    return asked_by_size(registry, exact=settings.exact, policy=policy, scheduler=settings.scheduler)


def new_planner(devices: int) -> Planner:
    """The planner of a session on so many devices; what is known of whole programs and of their values begins anew with it."""
    state.wholes = WholePrograms()
    registry, settings = _configured()
    state.asked_by_size = asked_by_size_in(registry, settings, devices)
    unsure = frozenset(o.name for o in registry.optimizations if not tolerates_growth([o]))
    factor = NARROW_FACTOR if state.asked_by_size else FACTOR
    state.planner = Planner(plan, state.stats, _planned, factor, judge_among(registry.optimizations), unsure)
    state.earlier = EarlierPrograms(state.planner.recent)
    return state.planner


def plan_anew() -> None:
    """Forget the plans of the open session: settings or plugins have changed that they depend on."""
    with recorder.sending:
        planner = new_planner(max(1, len(state.opened)))
        if state.session is not None:
            state.session.plan_by(planner)


def _planned(prepared: Prepared, program: Program) -> None:
    state.wholes.named(prepared)
    profile = state.earlier.latest
    state.earlier.planned(prepared, program)
    if profile is not None and isinstance(state.session, Session) and state.opened[0].attached.device.spill:
        tell_meaning(state.session, prepared, program, profile)


def last_profile() -> WorkloadProfile | None:
    """Profile of the whole program that was sent last; None where nothing was sent in this session.

    Found without analysing anything: a program that came before is known, also where it is sent in pieces. Facts in matches,
    such as the number of keys, and value ids are those of the program when it came first.
    """
    if isinstance(state.session, PoolSession):
        return state.session.last_profile
    recent = state.planner.recent if state.planner is not None else None
    return state.wholes.profile_of(recent[-1][0]) if recent else None


def plan(program: Program, without: Without = NOTHING_LEFT_OUT) -> PipelineResult:
    """The plan of a program, or of a piece of one, with what is known of it from before."""
    started = time.monotonic()
    profile = state.wholes.piece(program)
    known = state.earlier.residency(program) if profile is None else {}
    place = (*_configured(), state.opened[0].attached.device if state.opened else NOWHERE)
    result = plan_program(program, *place, profile=profile, known=known, without=without)
    about = result.recorded or result.profile
    assert about is not None
    if profile is None:
        state.wholes.remember(program, about)
    state.earlier.about(about)
    state.observers.tell("planned", instructions=len(program), duration=time.monotonic() - started)
    for recording in state.recordings:
        recording.append(result)
    return result


def switched_off(program: Program | ProgramGraph) -> Without:
    """Optimizations that were found not to pay for such a program in this session, each with the reason."""
    return state.planner.verdicts.about(program) if state.planner is not None else NOTHING_LEFT_OUT


def plan_whole(graph: ProgramGraph, where: Whereabouts, topology: NetworkTopology) -> PipelineResult:
    """The plan of a whole program over several devices."""
    started = time.monotonic()
    registry, settings = _configured()
    known = (where.resident, where.copies, where.stream, where.derived, where.occupied, where.known)
    result = plan_for_pool(graph, registry, settings, topology, *known)
    state.observers.tell("planned", instructions=len(graph.program), duration=time.monotonic() - started)
    for recording in state.recordings:
        recording.append(result)
    return result


@contextmanager
def record_plans() -> Iterator[list[PipelineResult]]:
    """Collects the result of every plan that is made meanwhile, of programs as they are and not in pieces."""
    recording: list[PipelineResult] = []
    state.recordings.append(recording)
    try:
        with whole_programs():
            yield recording
    finally:
        state.recordings.remove(recording)


@contextmanager
def whole_programs() -> Iterator[None]:
    """Send programs whole inside the block, and not in pieces while they are recorded."""
    port.whole_programs += 1
    try:
        yield
    finally:
        port.whole_programs -= 1
