"""The placement policy `round_robin`: devices in turn, knowing nothing."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import PlacementPolicy, hookimpl
from djinn_round_robin.policy import RoundRobin

__all__ = ["RoundRobin", "djinn_api_version", "djinn_register_placement_policies"]

djinn_api_version = 1


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `round_robin`."""
    return [RoundRobin()]
