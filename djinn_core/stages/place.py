"""Stage 5: which device runs and keeps what."""

from __future__ import annotations

from djinn_core.hookspecs.placement import PlacementContext, PlacementPolicy
from djinn_core.ir.placement import Placement
from djinn_core.stages.attribution import title, warn_skipped
from djinn_core.stages.verify import check_placement


def place(context: PlacementContext, policy: PlacementPolicy, fallback: PlacementPolicy) -> Placement:
    """The policy's placement; the fallback's, with a warning that names the policy, where it fails or breaks a rule.

    Raises:
        InvalidStage: the fallback breaks a rule as well.
    """
    if policy is not fallback:
        try:
            return _checked(context, policy)
        except Exception as error:
            warn_skipped("placement policy", policy, error, f"{fallback.name!r} places this graph")
    return _checked(context, fallback)


def _checked(context: PlacementContext, policy: PlacementPolicy) -> Placement:
    placement = policy.place(context)
    check_placement(context, placement, title("placement policy", policy))
    return placement
