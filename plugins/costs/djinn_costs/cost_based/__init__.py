"""The placement policy `cost_based`: minimise the predicted time. It uses several devices only if they save time."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import PlacementPolicy, hookimpl
from djinn_costs.cost_based.policy import CostBased

__all__ = ["CostBased", "djinn_api_version", "djinn_register_placement_policies"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """Register the placement policy `cost_based`."""
    return [CostBased()]
