"""The router `pool`: run programs over several executors that act as one device. Executors can join and leave.

- `router`: submissions over several executors. `pool_planner`, `plan_for_pool`: plans of programs.
- `lowering`, `parts`: conversion of a plan to steps.
- `value_locations`, `held_uploads`, `pooled_derived_values`: locations of values.
- `list_ops`: ops over lists of tensors, split by executor.
- `load_balancing`, `placement_trials`, `first_calibration`: choice of the executors for a program.
- `routes`, `relay`, `topology`, `peer_reconnection`: links between executors.
- `questions`: requests to all executors.
- `link_measurement`: `djinn.topology`, and links between this process and the executors.
- `scaling`, `elastic_executors`, `drained_nodes`: executors that join and leave.
"""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Router, hookimpl

__all__ = ["djinn_api_version", "djinn_register_routers"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_routers() -> Iterable[Router]:
    """Register the router `pool`."""
    from djinn_pool.router import PoolRouter  # not needed to list it

    return [PoolRouter()]
