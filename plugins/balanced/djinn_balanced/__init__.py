"""The placement policy `balanced`: memory shared out evenly, in the order of use."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import PlacementPolicy, hookimpl
from djinn_balanced.policy import Balanced

__all__ = ["Balanced", "djinn_api_version", "djinn_register_placement_policies"]

djinn_api_version = 1


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `balanced`."""
    return [Balanced()]
