"""The optimization `split_batches`: split a large batch, so that several devices compute parts concurrently."""

from __future__ import annotations

import math
from typing import Final

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import DataResidency, OptimizationResult, Rewrite
from djinn_cnn.pipelining.batches import BatchRegion, region_of
from djinn_cnn.pipelining.state import reason_to_run_in_order

MAX_TIME_RATIO: Final = (
    0.7  # maximum predicted time relative to no split: a split costs time if the policy keeps the parts together
)
AMORTIZING_RUNS: Final = 8  # number of runs that share the transfer of a copied weight, which stays on its device
MESSAGE_SECONDS: Final = 1e-4  # minimum seconds of a message between devices


class SplitBatches(Optimization):
    """Split a batch into parts that run the same ops. The placement policy puts each part on its own device.

    A split helps if it saves more time than the transfers of inputs and results cost. Only ops that process each input
    of the batch independently are split. Their results are concatenated. Kernels may round differently for a smaller
    batch, so the optimization needs `exact=False`.
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
        reason_against = _reason_against(context)
        if reason_against:
            return OptimizationResult(self.name, applied=False, reason=reason_against)
        region = region_of(context)
        if region is None:
            return OptimizationResult(
                self.name, applied=False, reason="no ops process the inputs of a batch independently"
            )
        parts = min(len(context.topology.devices), region.size)
        undivided, divided = _predicted_seconds(context, region, parts)
        note = f"{len(region.nodes)} ops over a batch of {region.size} take {undivided * 1e3:.3g} ms, in {parts} parts"
        if divided > min(MAX_TIME_RATIO, 1 - context.margin) * undivided:
            reason = f"{note} with transfers {divided * 1e3:.3g} ms"
            return OptimizationResult(self.name, applied=False, reason=reason)
        rewrite = Rewrite(substitutions=(region.substitution(context.graph, parts),))
        return OptimizationResult(self.name, applied=True, reason=f"{note} {divided * 1e3:.3g} ms", rewrite=rewrite)


def _reason_against(context: OptimizationContext) -> str:
    if len(context.topology.devices) < 2:
        return "there is one device"
    if context.stream.following:
        return "successive inputs already keep all devices busy"
    if context.plan.substituted_nodes:
        return "another optimization has replaced some nodes"
    return reason_to_run_in_order(context)


def _predicted_seconds(context: OptimizationContext, region: BatchRegion, parts: int) -> tuple[float, float]:
    """Return the predicted seconds of the region on the fastest device, and in `parts` parts including transfers."""
    ids = [node.id for node, _ in region.nodes]
    undivided = min(math.fsum(row[n].seconds for n in ids) for row in context.costs.by_device.values())
    graph, (first, second) = context.graph, context.topology.devices[:2]
    link = context.topology.link(first.id, second.id)
    weights = {v for v in region.inputs if context.profile.residency.get(v) is DataResidency.PERSISTENT_WEIGHT}
    copy_seconds = sum(link.transfer_seconds(graph.meta(v).nbytes) for v in weights) / AMORTIZING_RUNS
    sent_values = [v for v in (*region.inputs, *region.outputs) if v not in weights]
    nbytes = sum(graph.meta(v).nbytes for v in sent_values) * (parts - 1) // parts
    return undivided, undivided / parts + MESSAGE_SECONDS + link.transfer_seconds(nbytes) + copy_seconds
