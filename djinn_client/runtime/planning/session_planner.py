"""The planner of the open session. What plans is imported when a program is planned: a session that runs tiny programs needs none of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.context import ClientContext
from djinn_client.runtime.planning.ab_tests import NOTHING, Without
from djinn_client.runtime.planning.planner import Planner, Planning, Recent
from djinn_core.ir.program import Program

if TYPE_CHECKING:
    from djinn_core.ir.graph import ProgramGraph
    from djinn_core.ir.result import PipelineResult


def new_planner(context: ClientContext, devices: int) -> Planner:
    """The planner of a session on `devices` devices."""
    assert context.settings is not None, "a session is open"
    planner = Planner(context.stats, partial(_begin, context, devices), partial(_needs_plan, context))
    save_plans(context)
    context.plans, context.asked_by_size = None, ()
    if devices > 1 and not context.settings.placement_policy:  # a policy that was named is followed
        from djinn_client.runtime.planning.plan_maker import placement_trials

        planner.learns_margin = True
        planner.placements = placement_trials(context, planner, devices)
    if context.registry is not None and context.registry.is_selected:
        planner.begin()
    context.planner = planner
    return planner


def _begin(context: ClientContext, devices: int, recent: Recent) -> Planning:
    from djinn_client.runtime.planning.plan_maker import begin_planning

    return begin_planning(context, devices, recent)


def _needs_plan(context: ClientContext) -> bool:
    """True where even a program that may not come again has to be planned: for its values to fit, or to be shown."""
    settings = context.settings
    assert settings is not None, "a session is open"
    hinted = bool(context.opened and context.opened[0].attached.device.spill)  # its evictions follow what plans say
    return settings.plan_first_runs or bool(settings.memory_limits or context.recordings) or hinted


def save_plans(context: ClientContext) -> None:
    """Write the plans of the session that is open, or has just ended, for later processes."""
    if context.plans is not None:
        with recorders.sending:
            context.plans.save()


def plan_anew(context: ClientContext) -> None:
    """Forget the plans of the open session: settings or plugins have changed that they depend on."""
    with recorders.sending:
        planner = new_planner(context, max(1, len(context.opened)))
        if context.session is not None:
            context.session.plan_by(planner)


def switched_off(context: ClientContext, program: Program | ProgramGraph) -> Without:
    """Optimizations that were found not to pay for such a program in this session, each with the reason."""
    return context.planner.verdicts.about(program) if context.planner is not None else NOTHING


@contextmanager
def record_plans(context: ClientContext) -> Iterator[list[PipelineResult]]:
    """Collects the result of every plan that is made meanwhile, of programs as they are and not in pieces."""
    recording: list[PipelineResult] = []
    context.recordings.append(recording)
    try:
        with whole_programs():
            yield recording
    finally:
        context.recordings.remove(recording)


@contextmanager
def whole_programs() -> Iterator[None]:
    """Send programs whole inside the block, and not in pieces while they are recorded."""
    port.whole_programs += 1
    try:
        yield
    finally:
        port.whole_programs -= 1
