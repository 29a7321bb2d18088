"""The placement policy `pinned`: modules on the devices that the setting `pins` names."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import PlacementPolicy, hookimpl
from djinn_pinned.policy import Pinned

__all__ = ["Pinned", "djinn_api_version", "djinn_register_placement_policies"]

djinn_api_version = 1


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `pinned`."""
    return [Pinned()]
