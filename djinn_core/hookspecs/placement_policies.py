"""Stage 5, place: placement policies choose a device for every node and value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

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
    """The input of a placement policy.

    Attributes:
        resident: device id by value, for inputs that already are on a device; other inputs are uploaded to their
            placement. The entry for `RANDOM_STATE` is the device on which random ops must run.
        copies: ids of the other devices that hold a copy, by input value.
        pins: devices by patterns of module paths, from the setting `pins`.
        stream: the programs of this structure that are in flight.
        fetch: values that the client requests after the program.
        memory_limits: the most bytes, inputs included, that the program may hold at once on a device, by device id.
            Devices without an entry have no limit.
        margin: share of the single-device time that several devices must be predicted to save before they are used.
            1 if the program should run on one device whenever it fits there.
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


class PlacementPolicy(ABC):
    """Choose where a program runs. The planner calls it once for each new graph, in the client, from any thread.

    `djinn.planning.assign_blocks` builds a legal placement from a function that chooses a device for one node.

    The planner verifies each placement. If `place` raises or breaks a rule, the planner logs a warning that names the policy,
    and the built-in `single` places this graph. A policy may raise `DoesNotFit` if no placement fits: that is no failure.

    Attributes:
        name: unique among policies.
        preference: the policy with the greatest preference is the default for several devices; ties go to the first
            name. A policy with the preference None is used only if the setting `placement_policy` names it.
        tolerates_growth: as in `Pattern`.
    """

    name: str
    preference: int | None = None
    tolerates_growth: bool = False

    @abstractmethod
    def place(self, context: PlacementContext) -> Placement:
        """Return a device and a reason for every node of the plan, and a device for every value."""


@hookspec
def djinn_register_placement_policies(settings: Any) -> Iterable[PlacementPolicy]:
    """Return the placement policies that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. The setting
    `placement_policy` selects a policy. Without the setting, programs over several devices use the policy with the
    greatest `preference`, and other programs the built-in `single`. If a policy raises, `single` places that graph.
    """
    del settings
    raise NotImplementedError
