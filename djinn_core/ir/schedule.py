"""Execution schedules: a list of steps for each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum

import attrs
from attrs.validators import instance_of

from djinn_core.ir.checked_fields import mapping_of, tuple_of
from djinn_core.ir.program import Program
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.ir.substitution import RewrittenProgram


class SchedulingStrategy(str, Enum):
    """Execution strategy of a scheduling group."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    PIPELINE = "pipeline"
    PRIORITY = "priority"
    DYNAMIC = "dynamic"


@attrs.frozen
class Upload:
    """Schedule step: the client sends bytes to the device, which become `value`."""

    value: int


@attrs.frozen
class Run:
    """Schedule step: the device runs these nodes in order."""

    nodes: tuple[int, ...]


@attrs.frozen
class Send:
    """Schedule step: the device sends `value` to the device `target`."""

    value: int
    target: str


@attrs.frozen
class Receive:
    """Schedule step: the device waits for `value` from the device `source`."""

    value: int
    source: str


@attrs.frozen
class Free:
    """Schedule step: the device frees `values`."""

    values: tuple[int, ...]


@attrs.frozen
class Fetch:
    """Schedule step: the device sends `value` back to the client."""

    value: int


Step = Upload | Run | Send | Receive | Free | Fetch


@attrs.frozen
class SchedulingGroup:
    """Nodes that run together on one device, at one stage.

    Attributes:
        stage: number of the stage; stages run in order, groups of one stage may run at the same time.
        device: device id.
        nodes: node ids in order.
        strategy: how the group runs.
        priority: groups with larger priorities run first within a stage.
    """

    stage: int
    device: str
    nodes: tuple[int, ...]
    strategy: SchedulingStrategy = SchedulingStrategy.SEQUENTIAL
    priority: int = 0


@attrs.frozen(repr=False)
class ExecutionSchedule(ShortRepr):
    """Result of the stage `schedule`: a list of steps for each device.

    Attributes:
        program: the program to execute.
        groups: stages and groups in order. Replicas are in no group.
        steps: by device id the steps in order.
        replace: for each replaced value, its substitute.
        equal_slots: conditions on the slots under which the schedule holds.
        scheduler: name of the scheduler that ordered the nodes.
        reasons: decisions of the scheduler with reasons. After a fallback they name the scheduler that failed.
        rewritten: the rewrite that produced the program, if any.
    """

    program: Program
    groups: tuple[SchedulingGroup, ...] = attrs.field(validator=tuple_of(SchedulingGroup))
    steps: Mapping[str, tuple[Step, ...]] = attrs.field(validator=mapping_of(str, tuple))
    replace: Mapping[int, int] = attrs.field(factory=dict, validator=mapping_of(int, int))
    equal_slots: tuple[tuple[int, int], ...] = ()
    scheduler: str = attrs.field(default="", validator=instance_of(str))
    reasons: tuple[str, ...] = attrs.field(default=(), validator=tuple_of(str))
    rewritten: RewrittenProgram | None = attrs.field(default=None, repr=False)

    @property
    def stages(self) -> tuple[tuple[SchedulingGroup, ...], ...]:
        """The groups of each stage; stages run in order."""
        numbers = sorted({group.stage for group in self.groups})
        return tuple(tuple(group for group in self.groups if group.stage == number) for number in numbers)

    @property
    def total_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def node_to_stage(self) -> dict[int, int]:
        """For each node that runs, the position of its stage in `stages`."""
        return {node: at for at, stage in enumerate(self.stages) for group in stage for node in group.nodes}

    @property
    def node_to_group(self) -> dict[int, int]:
        """For each node that runs, the position of its group in `groups`."""
        return {node: at for at, group in enumerate(self.groups) for node in group.nodes}

    @property
    def strategy(self) -> SchedulingStrategy:
        """The strategy of most nodes."""
        counts = Counter({SchedulingStrategy.SEQUENTIAL: 0})
        for group in self.groups:
            counts[group.strategy] += len(group.nodes)
        return counts.most_common(1)[0][0]
