"""Stage 6: schedule the steps of each device."""

from __future__ import annotations

import attrs

from djinn_core.errors import DoesNotFit
from djinn_core.hookspecs.schedulers import ScheduleMaker, SchedulingContext
from djinn_core.ir.schedule import ExecutionSchedule
from djinn_core.planning.stages.attribution import title, warn_skipped
from djinn_core.planning.stages.verify_schedule import check_schedule


def schedule(context: SchedulingContext, maker: ScheduleMaker, fallback: ScheduleMaker) -> ExecutionSchedule:
    """The scheduler's steps; the fallback's, with a warning and a reason that name it, where it fails or breaks a rule.

    Raises:
        DoesNotFit: the fallback holds more than a device may, as well.
        InvalidStage: the fallback breaks a rule as well.
    """
    failed: tuple[str, ...] = ()
    if maker is not fallback:
        try:
            return _checked(context, maker)
        except DoesNotFit as error:
            failed = (f"{error}; {fallback.name!r} schedules this graph",)
        except Exception as error:
            failed = (
                warn_skipped("scheduler", maker, error, f"{fallback.name!r} schedules this graph", context.graph),
            )
    made = _checked(context, fallback)
    return attrs.evolve(made, reasons=(*failed, *made.reasons)) if failed else made


def _checked(context: SchedulingContext, maker: ScheduleMaker) -> ExecutionSchedule:
    made = maker.schedule(context)
    check_schedule(context, made, title("scheduler", maker))
    return made
