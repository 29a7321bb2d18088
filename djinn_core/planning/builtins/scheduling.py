"""The built-in scheduler `sequential`: program order, values moved when they are made and freed after their last use."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.schedulers import ScheduleMaker, SchedulingContext
from djinn_core.ir.schedule import ExecutionSchedule, SchedulingGroup
from djinn_core.planning.stages.steps import write_steps

djinn_api_version = "2.0"


class Sequential:
    """Runs nodes in program order, whatever the placement; a new stage begins where the device changes."""

    name = "sequential"
    tolerates_growth = True

    def schedule(self, context: SchedulingContext) -> ExecutionSchedule:
        """Groups and steps for every device of the placement."""
        groups = _groups(context)
        devices = len(context.placement.devices)
        return ExecutionSchedule(
            program=context.program,
            groups=groups,
            steps=write_steps(context, context.plan.nodes),
            replace=context.plan.replace,
            equal_slots=context.plan.equal_slots,
            scheduler=self.name,
            reasons=(f"program order in {len(groups)} stages on {devices} devices, freed after last use",),
        )


def _groups(context: SchedulingContext) -> tuple[SchedulingGroup, ...]:
    """One stage for each run of nodes on the same device."""
    device_of = {d.node: d.device for d in context.placement.decisions}
    runs: list[tuple[str, list[int]]] = []
    for node in context.plan.nodes:
        if not runs or runs[-1][0] != device_of[node]:
            runs.append((device_of[node], []))
        runs[-1][1].append(node)
    return tuple(SchedulingGroup(stage, device, tuple(nodes)) for stage, (device, nodes) in enumerate(runs))


@hookimpl
def djinn_register_schedulers() -> Iterable[ScheduleMaker]:
    """The scheduler `sequential`."""
    return [Sequential()]
