"""Nodes that a cluster drains. Ray tells programs that are connected to it directly, by functions that it does not document."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def draining_nodes(actor: Any, node: str) -> tuple[Collection[str], str]:
    """Ids of the nodes that are drained, and of the one that an actor is on; `node`: that one, once it is known.

    The second is only looked for where there are any. Raises whatever Ray does, and where it has no such functions.
    """
    from ray._private import state
    from ray.util.client import ray as over_client

    if over_client.is_connected():
        return (), node
    draining = state.state.get_draining_nodes()
    if draining and not node:
        node = str(state.actors(actor._actor_id.hex())["Address"]["NodeID"])  # noqa: SLF001 - as above
    return draining, node
