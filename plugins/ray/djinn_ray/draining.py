"""Query of the nodes that a Ray cluster drains, by undocumented functions of Ray that need a direct connection."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def draining_nodes(actor: Any, node: str) -> tuple[Collection[str], str]:
    """Return the ids of the drained nodes, and the id of the node of `actor`.

    Over `ray://`, return no drained nodes and `node`.

    Args:
        actor: handle of the actor.
        node: id of the actor's node, or empty. If it is empty and nodes are drained, the id is looked up.

    Raises:
        AttributeError: this version of Ray lacks these functions.
        Exception: Ray does not answer.
    """
    from ray._private import state
    from ray.util.client import ray as over_client

    if over_client.is_connected():
        return (), node
    draining = state.state.get_draining_nodes()
    if draining and not node:
        node = str(state.actors(actor._actor_id.hex())["Address"]["NodeID"])  # noqa: SLF001 - as above
    return draining, node
