"""Stage 6, schedule: schedulers order the work of every device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.ir.checked_fields import read_only
from djinn_core.ir.costs import Costs, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import Placement
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.program import Program
from djinn_core.ir.schedule import SchedulingStrategy
from djinn_core.ir.short_repr import ShortRepr


@attrs.frozen(repr=False)
class SchedulingContext(ShortRepr):
    """The input of a scheduler.

    Attributes:
        resident: device id by value, for inputs that already are on a device; other inputs must be uploaded.
        fetch: values that the client requests after the program.
        copies: ids of the other devices that hold a copy, by input value.
        memory_limits: the most bytes, inputs included, that the program may hold at once on a device, by device id.
            Devices without an entry have no limit.
        latency_target: seconds in which the program should complete; 0 for as soon as possible.
    """

    program: Program
    graph: Graph
    plan: OptimizationPlan
    placement: Placement
    costs: Costs
    topology: NetworkTopology
    resident: Mapping[int, str] = attrs.field(factory=dict, converter=read_only)
    fetch: tuple[int, ...] = ()
    copies: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict, converter=read_only)
    memory_limits: Mapping[str, int] = attrs.field(factory=dict, converter=read_only)
    latency_target: float = 0.0


@attrs.frozen
class NodePriority:
    """The order in which a scheduler wants the nodes of a program to run.

    Attributes:
        key: returns the sort key of a node by its id. The ready node with the least key runs first; ties follow program order.
        reason: explanation of the order for people.
        strict: False: each idle device takes the ready node with the least key (list scheduling). True: nodes run in the order of
            their keys as far as dependences allow, even if a device has to wait.
        group_priority: returns the priority of the group that begins with a node; by default 0 for all groups.
    """

    key: Callable[[int], Any]
    reason: str = attrs.field(validator=attrs.validators.instance_of(str))
    strict: bool = False
    group_priority: Callable[[int], int] | None = None


class Scheduler(ABC):
    """Order the work of the devices. The planner calls it once for each new graph, in the client, from any thread.

    A scheduler only ranks nodes. The planner builds the steps: it respects every dependence, moves values between devices,
    frees them after their last use and verifies the result. If `priority` or a key raises, the planner logs a warning that names
    the scheduler, and the built-in `sequential` schedules this graph. A scheduler may raise `DoesNotFit` if no order keeps to the
    memory limits: that is no failure.

    Attributes:
        name: unique among schedulers.
        strategy: how the groups of its schedules are labelled. `SEQUENTIAL` begins a new stage wherever the device changes.
        preference: the scheduler with the greatest preference is the default of `djinn plan`; ties go to the first
            name. A scheduler with the preference None is used only if the setting `scheduler` names it.
        tolerates_growth: as in `Pattern`.
    """

    name: str
    strategy: SchedulingStrategy = SchedulingStrategy.PRIORITY
    preference: int | None = None
    tolerates_growth: bool = False

    @abstractmethod
    def priority(self, context: SchedulingContext) -> NodePriority:
        """Return the priorities of the nodes in `context.plan.nodes`."""


@hookspec
def djinn_register_schedulers(settings: Any) -> Iterable[Scheduler]:
    """Return the schedulers that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. The setting `scheduler`
    selects a scheduler; the default is the built-in `sequential`. If a scheduler raises, `sequential` schedules that
    graph.
    """
    del settings
    raise NotImplementedError
