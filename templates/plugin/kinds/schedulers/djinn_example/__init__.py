"""A scheduler for Djinn: one op a stage, every value sent at the moment when it is needed, nothing freed early."""

from __future__ import annotations

from collections import defaultdict

from djinn.hooks import (
    ExecutionSchedule,
    Fetch,
    Receive,
    Run,
    ScheduleMaker,
    SchedulingContext,
    SchedulingGroup,
    Send,
    Step,
    Upload,
    hookimpl,
)

djinn_api_version = "2.0"


class ExampleScheduler:
    """Chosen with `djinn.configure(scheduler="example")`."""

    name = "example"
    tolerates_growth = True  # what it says does not depend on how long a sequence or a cache is

    def schedule(self, context: SchedulingContext) -> ExecutionSchedule:
        """Groups and per-device steps that respect every edge of the graph."""
        where = {decision.node: decision.device for decision in context.placement.decisions}
        steps: dict[str, list[Step]] = defaultdict(list)
        arrived: set[int] = set()
        for node in context.plan.nodes:
            for value in dict.fromkeys(context.graph.nodes[node].inputs):
                _bring(context.plan.replace.get(value, value), where[node], context, arrived, steps)
            steps[where[node]].append(Run((node,)))
        for value in context.fetch:
            real = context.plan.replace.get(value, value)
            steps[context.placement.values[real]].append(Fetch(real))
        groups = [SchedulingGroup(stage, where[node], (node,)) for stage, node in enumerate(context.plan.nodes)]
        return ExecutionSchedule(
            program=context.program,
            groups=tuple(groups),
            steps={device: tuple(taken) for device, taken in steps.items()},
            replace=context.plan.replace,
            equal_slots=context.plan.equal_slots,
            scheduler=self.name,
            reasons=("one op a stage",),
        )


def _bring(
    value: int, device: str, context: SchedulingContext, arrived: set[int], steps: dict[str, list[Step]]
) -> None:
    """Steps that make `value` available on `device`."""
    home = context.placement.values[value]
    if value in context.graph.inputs and value not in arrived:
        arrived.add(value)
        source = context.resident.get(value)
        if source is None:
            steps[home].append(Upload(value))
        elif source != home:
            steps[source].append(Send(value, home))
            steps[home].append(Receive(value, source))
    if home != device:
        steps[home].append(Send(value, device))
        steps[device].append(Receive(value, home))


@hookimpl
def djinn_register_schedulers() -> list[ScheduleMaker]:
    """The schedulers that this plugin offers."""
    return [ExampleScheduler()]
