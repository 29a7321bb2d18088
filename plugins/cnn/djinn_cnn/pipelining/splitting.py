"""The optimization `split_batches`: split a large batch, so that several devices compute parts concurrently."""

from __future__ import annotations

import math
from typing import Final

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import DataResidency, OptimizationResult, Rewrite
from djinn_cnn.pipelining.batches import BatchRegion, region_of
from djinn_cnn.pipelining.state import what_is_carried

MAX_TIME_RATIO: Final = (
    0.7  # maximum predicted time relative to no split: splitting costs time if the policy keeps the parts together
)
RUNS: Final = 8  # a copied weight stays on its device, so its transfer counts as shared by this number of runs
HOP: Final = 1e-4  # minimum seconds of a message between devices


class SplitBatches(Optimization):
    """Split a batch into parts that run the same ops. The placement policy puts each part on its own device.

    A split helps if it saves more time than the transfers of inputs and results cost. Only ops that process each input
    of the batch separately are split. Then the parts are concatenated. Kernels may round differently for a smaller
    batch, so the optimization is inexact.
    """

    name = "split_batches"
    exact = False
    tolerates_growth = True  # a substitution is valid only for the exact calls
    after = frozenset({"pipelining", "fold_batch_norms", "fuse_projections"})

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False, because the optimization acts only over several devices."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a split into one part per device, or the reason why the batch is not split."""
        refused = _why_not(context)
        if refused:
            return OptimizationResult(self.name, applied=False, reason=refused)
        region = region_of(context)
        if region is None:
            return OptimizationResult(self.name, applied=False, reason="no ops treat each input of a batch separately")
        parts = min(len(context.topology.devices), region.size)
        undivided, divided = _predicted(context, region, parts)
        note = f"{len(region.nodes)} ops over a batch of {region.size} take {undivided * 1e3:.3g} ms, in {parts} parts"
        if divided > min(MAX_TIME_RATIO, 1 - context.margin) * undivided:
            reason = f"{note} with transfers {divided * 1e3:.3g} ms"
            return OptimizationResult(self.name, applied=False, reason=reason)
        rewrite = Rewrite(substitutions=(region.substitution(context.graph, parts),))
        return OptimizationResult(self.name, applied=True, reason=f"{note} {divided * 1e3:.3g} ms", rewrite=rewrite)


def _why_not(context: OptimizationContext) -> str:
    if len(context.topology.devices) < 2:
        return "there is one device"
    if context.stream.following:
        return "successive inputs already keep all devices busy"
    if context.plan.substituted:
        return "another optimization has replaced some nodes"
    return what_is_carried(context)


def _predicted(context: OptimizationContext, region: BatchRegion, parts: int) -> tuple[float, float]:
    """Return the predicted seconds of the region on the fastest device, and in `parts` parts.

    The seconds in parts include the transfers.
    """
    ids = [node.id for node, _ in region.nodes]
    undivided = min(math.fsum(row[n].seconds for n in ids) for row in context.costs.by_device.values())
    graph, (first, second) = context.graph, context.topology.devices[:2]
    link = context.topology.link(first.id, second.id)
    weights = {v for v in region.inputs if context.profile.residency.get(v) is DataResidency.PERSISTENT_WEIGHT}
    copying = sum(link.transfer_seconds(graph.meta(v).nbytes) for v in weights) / RUNS
    travels = [v for v in (*region.inputs, *region.outputs) if v not in weights]
    size = sum(graph.meta(v).nbytes for v in travels) * (parts - 1) // parts
    return undivided, undivided / parts + HOP + link.transfer_seconds(size) + copying
