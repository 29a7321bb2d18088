"""The planner of the open session. Stages are imported when a program is planned: most sessions need none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.context import ClientContext
from djinn_client.runtime.planning.ab_tests import NOTHING, Without
from djinn_client.runtime.planning.planner import Planner, Planning, Recent
from djinn_core.ir.program import Program
from djinn_core.logs import get_logger
from djinn_core.settings import DEFAULT_SCHEDULER

if TYPE_CHECKING:
    from djinn_core.hookspecs.optimizations import Optimization
    from djinn_core.ir.graph import Graph
    from djinn_core.ir.result import PipelineResult

log = get_logger("djinn.stages")

PLANNING: Final = (
    "patterns",
    "cost_models",
    "optimizations",
    "placement_policies",
    "schedulers",
)  # kinds of plugins that planning uses


def new_planner(context: ClientContext, devices: int) -> Planner:
    """Return the planner of a session on `devices` devices."""
    assert context.settings is not None, "a session is open"
    planner = Planner(
        context.stats,
        partial(_begin, context, devices),
        lambda: plans_all(context),
        lambda program: is_wanted(context, program),
        lambda: are_loaded(context, "optimizations"),
        lambda: describes_values(context),
    )
    context.growth_intolerant_plugins, context.kinds_to_load = (), ()
    if devices > 1 or plans_all(context) or context.configured()[0].is_selected:
        are_loaded(context, *PLANNING)
    # Plugins in the settings are loaded already, and may be under test: ask their optimizations from the first program
    # on.
    planner.asks_optimizations = context.configured()[0].is_selected
    context.planner = planner
    return planner


def _begin(context: ClientContext, devices: int, recent: Recent) -> Planning:
    from djinn_client.runtime.planning.plan_maker import begin_planning

    return begin_planning(context, devices, recent)


def plans_all(context: ClientContext) -> bool:
    """Return True while every program is planned.

    Memory limits, and a configured scheduler or placement policy, need plans. `record_plans` also needs them.
    """
    settings = context.settings
    assert settings is not None, "a session is open"
    needs_plan = settings.memory_limits or settings.placement_policy or settings.scheduler != DEFAULT_SCHEDULER
    return bool(needs_plan or context.recordings)


def describes_values(context: ClientContext) -> bool:
    """Return True if the first executor may evict values, so that submissions tell it the kinds of values."""
    executors = context.session.executors.current if context.session is not None else ()
    return bool(executors and executors[0].opened.attached.device.spill)


def is_wanted(context: ClientContext, program: Program) -> bool:
    """Return True if an optimization in use requests the program, and planning plugins are loaded."""
    registry, settings = context.configured()
    if not are_loaded(context, "optimizations"):
        return False
    ops = frozenset([call.op for call in program.calls])
    is_requested = any(_wants(o, ops) for o in registry.optimizations if o.exact or not settings.exact)
    return is_requested and are_loaded(context, *PLANNING)


def are_loaded(context: ClientContext, *kinds: str) -> bool:
    """Return True if plugins of these kinds are loaded. Otherwise mark them for `load_plugins`.

    The caller holds the sink's lock. A plugin may use the device while it is imported, and other threads may load
    plugins, so loading a plugin now could deadlock.
    """
    if context.configured()[0].has_loaded(kinds):
        return True
    context.kinds_to_load = kinds
    return False


def load_plugins(context: ClientContext) -> None:
    """Load the plugins that `are_loaded` marked, and call `Planner.ask_optimizations`.

    The caller must not hold the sink's lock.
    """
    kinds, context.kinds_to_load = context.kinds_to_load, ()
    context.configured()[0].load(*kinds)
    with port.lock:
        if context.planner is not None:
            context.planner.ask_optimizations()


def _wants(optimization: Optimization, ops: frozenset[str]) -> bool:
    try:
        return bool(optimization.wants(ops))
    except Exception as error:
        log.warning(
            "a plugin failed and is not used for a program",
            plugin=f"optimization {optimization.name!r} ({type(optimization).__module__})",
            error=f"{type(error).__name__}: {error}",
            instead="the program is not planned for this optimization",
        )
        return False


def drop_plans(context: ClientContext) -> None:
    """Drop the plans of the open session, because settings or plugins that affect plans have changed."""
    if len(context.opened) > 1:
        context.configured()[0].load(*PLANNING)
    with port.lock:
        planner = new_planner(context, max(1, len(context.opened)))
        if context.session is not None:
            for executor in context.session.executors.current:
                executor.submissions.planner = planner
            context.session.router.drop_plans()


def switched_off(context: ClientContext, program: Program | Graph) -> Without:
    """Return the optimizations that the session has switched off for programs of this structure, each with the reason."""
    return context.planner.verdicts.switched_off(program) if context.planner is not None else NOTHING


def with_measured(
    context: ClientContext, result: PipelineResult, program: Program | Graph | None = None
) -> PipelineResult:
    """Return `result` with the times of A/B tests of `program`, by default the recorded program of `result`."""
    if context.planner is None:
        return result
    if program is None:
        rewritten = result.schedule.rewritten if result.schedule is not None else None
        program = rewritten.origin if rewritten is not None else result.graph
    return attrs.evolve(result, trial_times=context.planner.verdicts.measured(program))


def plan_in_session(context: ClientContext, graph: Graph) -> PipelineResult | None:
    """Return the plan that a program would get now in the open session.

    Return None if no session is open, or if the session's router plans programs for one device only.
    """
    with port.lock:
        return None if context.session is None else context.session.router.plan(graph)
