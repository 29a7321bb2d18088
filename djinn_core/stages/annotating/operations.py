"""The tier of operations: the workload type from how often each op occurs, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from djinn_core.ir.attention import FUSED_ATTENTION, SOFTMAX
from djinn_core.ir.op_families import CONVOLUTION, EMBEDDING, MATRIX_PRODUCT, OPTIMIZER
from djinn_core.ir.profile import WorkloadType
from djinn_core.stages.annotating.evidence import Judgement

_CONVOLUTION_1D = frozenset({"conv1d", "conv_transpose1d"})
_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"})
_GROUPS = frozenset({"group_norm", "native_group_norm"})


def judge_operations(by_op: Mapping[str, Sequence[int]]) -> Judgement:
    """The first rule that fits."""

    def count(operations: frozenset[str]) -> int:
        return sum(len(by_op.get(o, ())) for o in operations)

    convolutions, products, tables = count(CONVOLUTION), count(MATRIX_PRODUCT), count(EMBEDDING)
    attention = count(FUSED_ATTENTION | SOFTMAX)
    how = f"{convolutions} convolutions, {products} products, {tables} look-ups, {attention} attentions"
    rules = (
        (any("_backward" in o for o in by_op) or count(OPTIMIZER), WorkloadType.TRAINING, 0.9),
        (count(_BAGS) and products, WorkloadType.RECOMMENDER, 0.8),
        (
            {"sin", "cos"} <= by_op.keys() and count(_GROUPS) and convolutions and not tables,
            WorkloadType.DIFFUSION,
            0.6,
        ),
        (count(_CONVOLUTION_1D) and not tables, WorkloadType.AUDIO, 0.5),
        (convolutions and tables and attention, WorkloadType.MULTIMODAL, 0.4),
        (convolutions, WorkloadType.VISION, 0.5),
        (tables and attention, WorkloadType.LLM, 0.4),
        (tables >= 3 and products, WorkloadType.RECOMMENDER, 0.4),
    )
    for fits, workload, confidence in rules:
        if fits:
            return Judgement(workload, confidence, how)
    return Judgement(WorkloadType.GENERIC, 0.3, how)
