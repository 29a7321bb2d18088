"""Stage 5: which device runs and keeps what."""

from __future__ import annotations

from djinn_core.errors import InvalidStage
from djinn_core.hookspecs.placement import PlacementContext, PlacementPolicy
from djinn_core.ir.indexes import bind, bound_nodes, only_bound
from djinn_core.ir.placement import Placement
from djinn_core.ir.replicas import with_replicas
from djinn_core.logs import get_logger
from djinn_core.stages.attribution import title, warn_skipped
from djinn_core.stages.verify import check_placement

_log = get_logger("djinn.stages")


def place(context: PlacementContext, policy: PlacementPolicy, fallback: PlacementPolicy) -> Placement:
    """The policy's placement; the fallback's, with a warning that names the policy, where it fails or breaks a rule.

    Raises:
        InvalidStage: the fallback breaks a rule as well, or cannot place it either; then it is what the policy said.
    """
    if policy is fallback:
        return _checked(context, fallback)
    try:
        return _checked(context, policy)
    except Exception as error:
        warn_skipped("placement policy", policy, error, f"{fallback.name!r} places this graph")
        refusal = error
    try:
        return _checked(context, fallback)
    except InvalidStage as error:
        if isinstance(refusal, InvalidStage):
            raise refusal from error
        raise


def _checked(context: PlacementContext, policy: PlacementPolicy) -> Placement:
    placement = _decided(context, policy)
    check_placement(context, placement, title("placement policy", policy))
    return _with_replicas(context, placement) if context.plan.replicas else placement


def _decided(context: PlacementContext, policy: PlacementPolicy) -> Placement:
    """What the policy decides for tensors of index 0; those of other indexes are on the devices of these."""
    graph, nodes, devices = context.graph, context.plan.nodes, [d.id for d in context.topology.devices]
    bound = bound_nodes(graph, nodes)
    if not bound:
        return policy.place(context)
    if len(bound) == len(nodes):
        return only_bound(graph, nodes, bound, devices)
    return bind(graph, policy.place(context), bound, devices)


def _with_replicas(context: PlacementContext, placement: Placement) -> Placement:
    """The placement with what the optimizations want to run on further devices; without it where that is illegal here."""
    more = with_replicas(context.graph, placement, context.plan, context.profile)
    try:
        check_placement(context, more, "optimizations with replicas")
    except InvalidStage as error:
        _log.warning("replicas_skipped", error=str(error), instead="what is wanted elsewhere is sent")
        return placement
    return more
