"""Programs, graphs and results of the planning stages; the matching language; helpers for policies and cost models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import lazy_names

# Each name is imported on first access (`__getattr__`).
if TYPE_CHECKING:
    from djinn_client.interception.recording.replay import call_again
    from djinn_client.interception.recording.substitute import group
    from djinn_client.runtime.client import last_profile
    from djinn_core.ir.arguments import arguments, slot_positions
    from djinn_core.ir.colocation import Colocation, colocation_of, homes_of_values, resident_blocks, storage_sizes
    from djinn_core.ir.costs import Calibration, CostEstimate, Costs, DeviceCapabilities, Link, NetworkTopology
    from djinn_core.ir.flow import COPIES, chain, is_view, origin
    from djinn_core.ir.graph import Edge, Graph, Node
    from djinn_core.ir.handles import RANDOM_STATE, storage_of
    from djinn_core.ir.op_families import (
        ACTIVATION,
        CONVOLUTION,
        EMBEDDING,
        FUSED_ATTENTION,
        LOSS,
        MATRIX_PRODUCT,
        NORMALISATION,
        OPTIMIZER,
        POOLING,
        SOFTMAX,
        is_backward,
    )
    from djinn_core.ir.placement import HintUse, Placement, PlacementDecision
    from djinn_core.ir.plan import OptimizationPlan, OptimizationResult, Rewrite
    from djinn_core.ir.profile import (
        DataResidency,
        ExecutionPhase,
        Lineage,
        Modality,
        PatternMatch,
        Tier,
        WorkloadProfile,
        WorkloadType,
    )
    from djinn_core.ir.program import Instruction, Program
    from djinn_core.ir.result import PipelineResult
    from djinn_core.ir.schedule import (
        ExecutionSchedule,
        Fetch,
        Free,
        Receive,
        Run,
        SchedulingGroup,
        SchedulingStrategy,
        Send,
        Step,
        Upload,
    )
    from djinn_core.ir.stream import Stream
    from djinn_core.ir.substitution import Substitution
    from djinn_core.ir.values import TensorMeta
    from djinn_core.planning.builtins.work import Work, work_of
    from djinn_core.planning.matching.gradients import Gradients
    from djinn_core.planning.matching.layers import is_weight, layer_at, linear
    from djinn_core.planning.matching.matcher import matcher
    from djinn_core.planning.matching.terms import anything, op, through
    from djinn_core.planning.stages.annotating.kinds import data_kinds
    from djinn_core.planning.stages.assign_blocks import BlockHomes, assign_blocks
    from djinn_core.planning.stages.estimate import estimate
    from djinn_core.planning.stages.schedule import build_schedule
    from djinn_core.planning.stages.simulate import memory_peaks, simulate
    from djinn_profiler.captured import execute
    from djinn_profiler.explain.text import explain
    from djinn_profiler.graphs.fx_graph import fx_graph
    from djinn_profiler.graphs.networkx_graph import to_networkx
    from djinn_profiler.plans.cluster import read_cluster
    from djinn_profiler.plans.cluster_plan import ClusterPlan, plan_for_cluster, planning_plugins
    from djinn_profiler.semantic_metadata import SemanticMetadata

__all__ = [
    "ACTIVATION",
    "CONVOLUTION",
    "COPIES",
    "EMBEDDING",
    "FUSED_ATTENTION",
    "LOSS",
    "MATRIX_PRODUCT",
    "NORMALISATION",
    "OPTIMIZER",
    "POOLING",
    "RANDOM_STATE",
    "SOFTMAX",
    "BlockHomes",
    "Calibration",
    "ClusterPlan",
    "Colocation",
    "CostEstimate",
    "Costs",
    "DataResidency",
    "DeviceCapabilities",
    "Edge",
    "ExecutionPhase",
    "ExecutionSchedule",
    "Fetch",
    "Free",
    "Gradients",
    "Graph",
    "HintUse",
    "Instruction",
    "Lineage",
    "Link",
    "Modality",
    "NetworkTopology",
    "Node",
    "OptimizationPlan",
    "OptimizationResult",
    "PatternMatch",
    "PipelineResult",
    "Placement",
    "PlacementDecision",
    "Program",
    "Receive",
    "Rewrite",
    "Run",
    "SchedulingGroup",
    "SchedulingStrategy",
    "SemanticMetadata",
    "Send",
    "Step",
    "Stream",
    "Substitution",
    "TensorMeta",
    "Tier",
    "Upload",
    "Work",
    "WorkloadProfile",
    "WorkloadType",
    "anything",
    "arguments",
    "assign_blocks",
    "build_schedule",
    "call_again",
    "chain",
    "colocation_of",
    "data_kinds",
    "estimate",
    "execute",
    "explain",
    "fx_graph",
    "group",
    "homes_of_values",
    "is_backward",
    "is_view",
    "is_weight",
    "last_profile",
    "layer_at",
    "linear",
    "matcher",
    "memory_peaks",
    "op",
    "origin",
    "plan_for_cluster",
    "planning_plugins",
    "read_cluster",
    "resident_blocks",
    "simulate",
    "slot_positions",
    "storage_of",
    "storage_sizes",
    "through",
    "to_networkx",
    "work_of",
]

_MODULES = {
    "djinn_client.interception.recording.replay": "call_again",
    "djinn_client.interception.recording.substitute": "group",
    "djinn_profiler.captured": "execute",
    "djinn_client.runtime.client": "last_profile",
    "djinn_core.ir.arguments": "arguments slot_positions",
    "djinn_core.ir.colocation": "Colocation homes_of_values resident_blocks storage_sizes colocation_of",
    "djinn_core.ir.costs": "Calibration CostEstimate Costs DeviceCapabilities Link NetworkTopology",
    "djinn_core.ir.flow": "COPIES chain is_view origin",
    "djinn_profiler.graphs.fx_graph": "fx_graph",
    "djinn_profiler.graphs.networkx_graph": "to_networkx",
    "djinn_core.ir.graph": "Edge Graph Node",
    "djinn_core.ir.handles": "RANDOM_STATE storage_of",
    "djinn_core.ir.op_families": "ACTIVATION CONVOLUTION EMBEDDING LOSS MATRIX_PRODUCT NORMALISATION OPTIMIZER POOLING is_backward FUSED_ATTENTION SOFTMAX",
    "djinn_core.ir.placement": "HintUse Placement PlacementDecision",
    "djinn_core.ir.plan": "OptimizationPlan OptimizationResult Rewrite",
    "djinn_core.ir.profile": "DataResidency ExecutionPhase Lineage Modality PatternMatch Tier WorkloadProfile WorkloadType",
    "djinn_core.ir.program": "Instruction Program",
    "djinn_core.ir.result": "PipelineResult",
    "djinn_core.ir.schedule": "ExecutionSchedule Fetch Free Receive Run SchedulingGroup SchedulingStrategy Send Step Upload",
    "djinn_core.ir.stream": "Stream",
    "djinn_core.ir.substitution": "Substitution",
    "djinn_core.ir.values": "TensorMeta",
    "djinn_profiler.semantic_metadata": "SemanticMetadata",
    "djinn_profiler.plans.cluster": "read_cluster",
    "djinn_core.planning.builtins.work": "Work work_of",
    "djinn_profiler.plans.cluster_plan": "ClusterPlan plan_for_cluster planning_plugins",
    "djinn_profiler.explain.text": "explain",
    "djinn_core.planning.matching.gradients": "Gradients",
    "djinn_core.planning.matching.layers": "is_weight layer_at linear",
    "djinn_core.planning.matching.matcher": "matcher",
    "djinn_core.planning.matching.terms": "anything op through",
    "djinn_core.planning.stages.annotating.kinds": "data_kinds",
    "djinn_core.planning.stages.assign_blocks": "BlockHomes assign_blocks",
    "djinn_core.planning.stages.estimate": "estimate",
    "djinn_core.planning.stages.schedule": "build_schedule",
    "djinn_core.planning.stages.simulate": "memory_peaks simulate",
}

if not TYPE_CHECKING:  # type checkers know the names from above
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
