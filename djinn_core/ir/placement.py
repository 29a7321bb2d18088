"""Placements: the device of each node and value, with a reason for each decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
from attrs.validators import instance_of

from djinn_core.ir.checked_fields import IS_MAPPING, IS_SET
from djinn_core.ir.short_repr import ShortRepr

# Minimum predicted saving, as a share of the time on one device, before a program uses several devices. Used while the
# accuracy of predictions is unknown.
MARGIN: Final = 0.1


@attrs.frozen
class PlacementDecision:
    """The device on which one node runs.

    Attributes:
        node: node id.
        device: device id.
        reason: why the node runs there, for people.
    """

    node: int
    device: str
    reason: str


@attrs.frozen
class HintUse:
    """How a placement used the hints of one name.

    Attributes:
        hint: name of the hints.
        decision: text that says how the hints changed the placement, or why they were ignored.
        seconds_before: predicted time of the program without the decision; None if not predicted.
        seconds_after: predicted time with the decision; None if not predicted.
    """

    hint: str
    decision: str
    seconds_before: float | None = None
    seconds_after: float | None = None


@attrs.frozen(repr=False)
class Placement(ShortRepr):
    """Result of the stage `place`: the device of each node and value.

    Attributes:
        decisions: device of each node that runs, in order.
        values: device id by value, inputs included: the device of its memory and its writes.
        policy: name of the policy that decided.
        copies: ids of other devices that keep a read-only copy of a value after the program, such as a shared weight. A
            write to the value drops its copies.
        replicas: nodes that also run on a further device instead of sending their results to it, with the reason.
        rejections: for each earlier attempt, in order, the reason why its placement does not fit. Policies leave it
            empty.
        spills: True if the placement needs spilling. Policies leave it False.
        uses: decisions of the policy because of hints.
        fixed_nodes: nodes whose device the user chose. They never move. If they do not fit, planning fails.
    """

    decisions: tuple[PlacementDecision, ...]
    values: Mapping[int, str] = attrs.field(validator=IS_MAPPING)
    policy: str = attrs.field(default="", validator=instance_of(str))
    copies: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict, validator=IS_MAPPING)
    replicas: tuple[PlacementDecision, ...] = ()
    rejections: tuple[str, ...] = ()
    spills: bool = False
    uses: tuple[HintUse, ...] = ()
    fixed_nodes: frozenset[int] = attrs.field(default=frozenset(), validator=IS_SET)

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the devices that are used, in order of first use."""
        return tuple(dict.fromkeys([d.device for d in self.decisions] or self.values.values()))
