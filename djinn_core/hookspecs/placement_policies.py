"""Stage 5, place: placement policies choose a device for every node and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.ir.checked_fields import read_only
from djinn_core.ir.costs import Costs, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import MARGIN, Placement
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.ir.stream import ALONE, Stream


@attrs.frozen(repr=False)
class PlacementContext(ShortRepr):
    """Everything that a placement policy may look at.

    Attributes:
        resident: device id by value, for the inputs that already live somewhere; the others are uploaded to where they
            are placed. Under `RANDOM_STATE` it says where random ops have to run.
        copies: ids of the other devices that hold a copy of an input.
        pins: devices by patterns of module paths, from the setting `pins`.
        stream: which programs of its structure are under way.
        fetch: values that the client wants when the program has run.
        memory_limits: by device id the bytes that the program may hold there at once, inputs included; devices that are not
            listed have no limit.
        margin: the share of the time on one device that several have to be predicted to save to be used; 1 where the program
            is to be on one device, if one can run it.
    """

    graph: Graph
    profile: WorkloadProfile
    plan: OptimizationPlan
    costs: Costs
    topology: NetworkTopology
    resident: Mapping[int, str] = attrs.field(converter=read_only)
    copies: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict, converter=read_only)
    pins: Mapping[str, str] = attrs.field(factory=dict, converter=read_only)
    stream: Stream = ALONE
    fetch: tuple[int, ...] = ()
    memory_limits: Mapping[str, int] = attrs.field(factory=dict, converter=read_only)
    margin: float = MARGIN


@runtime_checkable
class PlacementPolicy(Protocol):
    """Chooses where things run. `name` is unique among policies."""

    name: str

    def place(self, context: PlacementContext) -> Placement:
        """A device and a reason for every node of the plan, and a device for every value."""


@runtime_checkable
class PreferredPolicy(Protocol):
    """Optional member of a policy, with which it offers itself where the setting `placement_policy` names none.

    Attributes:
        preference: of the policies that have one, that with the greatest is used over several devices (of equal ones the first
            by name). Over one device, and where no policy has one, the built-in `single` is.
    """

    preference: int


@hookspec
def djinn_register_placement_policies(settings: Any) -> Iterable[PlacementPolicy]:
    """Return the placement policies that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. The setting
    `placement_policy` names the one that is used; by default that with the greatest `preference` over several devices, and else
    the built-in `single`. One that raises or breaks an
    invariant is replaced by `single` for that graph, with a warning that names it. Since API version 1.
    """
    del settings
    raise NotImplementedError
