"""Nodes that a cluster drains, from undocumented functions of Ray that work on direct connections only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def draining_nodes(actor: Any, node: str) -> tuple[Collection[str], str]:
    """Return the ids of the drained nodes, and the id of the node of `actor`.

    `node` is that id if it is known. It is looked up only if nodes are drained. Raises the errors of Ray, and `AttributeError` if
    Ray lacks these functions.
    """
    from ray._private import state
    from ray.util.client import ray as over_client

    if over_client.is_connected():
        return (), node
    draining = state.state.get_draining_nodes()
    if draining and not node:
        node = str(state.actors(actor._actor_id.hex())["Address"]["NodeID"])  # noqa: SLF001 - as above
    return draining, node
