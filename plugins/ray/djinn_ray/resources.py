"""Resources of a Ray cluster and of executors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_OF_ACTORS: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_OF_RAY: Final = ("node:", "object_store_memory", "bundle_group")  # resources that Ray adds itself
HEAD: Final = "node:__internal_head__"


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a Ray actor that needs a bundle of resources. `bundle`: amounts by Ray's names."""
    options: dict[str, Any] = {option: bundle.get(name, 0) for name, option in _OF_ACTORS.items()}
    if not options["memory"]:
        del options["memory"]
    return options | {"resources": {name: amount for name, amount in bundle.items() if name not in _OF_ACTORS}}


def lacking(nodes: Iterable[Mapping[str, Any]], bundle: Mapping[str, float], count: int, apart: bool = False) -> str:
    """Return why the nodes could not hold `count` bundles even if they were idle, or an empty string if they could.

    Args:
        nodes: result of `ray.nodes()`.
        bundle: amounts of resources by Ray's names.
        count: number of bundles.
        apart: True if each bundle needs a separate node.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    room = [min(int(node.get(name, 0) / amount + 1e-9) for name, amount in bundle.items()) for node in alive]
    if apart:
        room = [min(1, count_on_node) for count_on_node in room]
    if sum(room) >= count:
        return ""
    requirement = f"{count} executors with {shown(bundle)} each" if count > 1 else f"an executor with {shown(bundle)}"
    where = " on separate nodes" if apart and count > 1 else ""
    nodes_shown = "; ".join(shown(node) for node in alive) or "no node"
    return f"the Ray cluster can never hold {requirement}{where}: even if it is idle, {sum(room)} fit. Its nodes have: {nodes_shown}"


def shown(resources: Mapping[str, float]) -> str:
    """Return amounts of resources as text, with memory in GiB. Resources that Ray adds to each node are omitted."""
    amounts = [
        f"{amount / 2**30:.1f} GiB of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if not name.startswith(_OF_RAY)
    ]
    return ", ".join(amounts) or "nothing"


def head_address(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return the address of the cluster's head node, which every node reaches. `nodes`: result of `ray.nodes()`."""
    alive = [node for node in nodes if node["Alive"]]
    heads = [node for node in alive if HEAD in node["Resources"]]
    return str((heads or alive)[0]["NodeManagerAddress"])


def threads_of(wished: Mapping[str, float]) -> int:
    """Return the torch threads of an executor: its requested processors, or 0 (torch's default) if it requests none."""
    return max(1, int(wished["CPU"])) if "CPU" in wished else 0
