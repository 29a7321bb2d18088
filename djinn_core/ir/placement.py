"""Placements: the device of each node and value, with a reason for each decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
from attrs.validators import instance_of

from djinn_core.ir.checked_fields import IS_MAPPING, IS_SET
from djinn_core.ir.short_repr import ShortRepr

# The share of its time on one device that a program has to be predicted to save, for several to be used, where nothing is
# known of how exact predictions are.
MARGIN: Final = 0.1


@attrs.frozen
class PlacementDecision:
    """One node on one device.

    Attributes:
        node: node id.
        device: device id.
        reason: why, in words that a person can check.
    """

    node: int
    device: str
    reason: str


@attrs.frozen
class HintUse:
    """What a reader decided because of the hints of one name.

    Attributes:
        hint: name of the hints.
        decision: what followed, or why nothing followed, in words that a person can check.
        seconds_before, seconds_after: predicted time of the program without and with the decision; 0 if not predicted.
    """

    hint: str
    decision: str
    seconds_before: float = 0.0
    seconds_after: float = 0.0


@attrs.frozen(repr=False)
class Placement(ShortRepr):
    """Result of `place`.

    Attributes:
        decisions: one per node that runs, in order.
        values: device id by value, inputs included: where its memory is, and where it is written.
        policy: name of the policy that decided.
        copies: ids of other devices that keep a copy of a value when the program has run, such as of a weight that both use.
            A copy is for reading; a write to the value ends it.
        replicas: nodes that run on a further device as well, which uses what they make there in place of what their own
            device would send, and why that is quicker.
        refused: placements that were not taken because they do not fit, and why, in the order in which they were tried.
            Policies leave it empty.
        spills: whether it counts on what executors can keep elsewhere. Policies leave it False.
        uses: what the policy decided because of hints.
        pinned: nodes that are where the user asked for. They stay there: if that does not fit, planning fails.
    """

    decisions: tuple[PlacementDecision, ...]
    values: Mapping[int, str] = attrs.field(validator=IS_MAPPING)
    policy: str = attrs.field(default="", validator=instance_of(str))
    copies: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict, validator=IS_MAPPING)
    replicas: tuple[PlacementDecision, ...] = ()
    refused: tuple[str, ...] = ()
    spills: bool = False
    uses: tuple[HintUse, ...] = ()
    pinned: frozenset[int] = attrs.field(default=frozenset(), validator=IS_SET)

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the devices that are used, in order of first use."""
        return tuple(dict.fromkeys([d.device for d in self.decisions] or self.values.values()))
