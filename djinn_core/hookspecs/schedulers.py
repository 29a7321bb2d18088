"""Stage 6, schedule: schedulers order the work of every device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.ir.checked_fields import read_only
from djinn_core.ir.costs import Costs, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import Placement
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.program import Program
from djinn_core.ir.schedule import ExecutionSchedule
from djinn_core.ir.short_repr import ShortRepr


@attrs.frozen(repr=False)
class SchedulingContext(ShortRepr):
    """Everything that a scheduler may look at.

    Attributes:
        resident: device id by value, for the inputs that already live somewhere; the others must be uploaded.
        fetch: values that the client wants when the program has run.
        copies: ids of the other devices that hold a copy of an input.
        memory_limits: by device id the bytes that the program may hold there at once, inputs included; devices that are not
            listed have no limit.
        latency_target: seconds in which the program should be done; 0 if as soon as possible is wanted.
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


@runtime_checkable
class ScheduleMaker(Protocol):
    """Turns a placement into steps. `name` is unique among schedulers."""

    name: str

    def schedule(self, context: SchedulingContext) -> ExecutionSchedule:
        """Groups and per-device steps that respect every edge of the graph."""


@runtime_checkable
class PreferredScheduler(Protocol):
    """Optional member of a scheduler, with which it offers itself where `djinn plan` is told none.

    Attributes:
        preference: of the schedulers that have one, that with the greatest is taken (of equal ones the first by name).
    """

    preference: int


@hookspec
def djinn_register_schedulers(settings: Any) -> Iterable[ScheduleMaker]:
    """Return the schedulers that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. The setting `scheduler`
    names the one that is used (by default the built-in `sequential`). One that raises or breaks an invariant is replaced
    by `sequential` for that graph, with a warning that names it. Since API version 1.
    """
    del settings
    raise NotImplementedError
