"""Plugin API: the hook marker, the Protocols, and the values that they take and return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import importing
from djinn_core.errors import (
    AccessRefused,
    ConfigurationError,
    DjinnError,
    DoesNotFit,
    InvalidStage,
    PluginError,
    ProtocolError,
    RemoteError,
    SessionLost,
    StartupError,
    TransportError,
    UnsupportedOperation,
    WeightsUnavailable,
)
from djinn_core.hookspecs import API_VERSION, hookimpl

# A plugin imports of all this what it names (`__getattr__`).
if TYPE_CHECKING:
    from djinn_core.hookspecs.api_names import ApiName
    from djinn_core.hookspecs.assignment_policies import (
        AssignmentPolicy,
        AssignmentRefusal,
        AssignmentRequest,
        ExecutorLoad,
        TenantLoad,
    )
    from djinn_core.hookspecs.authenticators import Authenticator, Credentials, Denial, Identity
    from djinn_core.hookspecs.compilers import Compiler, CompilerContext, Replay
    from djinn_core.hookspecs.cost_models import CostModel, Probe
    from djinn_core.hookspecs.devices import Device, DeviceRuntime
    from djinn_core.hookspecs.executors import (
        ExecutorEngine,
        ExecutorHandle,
        ExecutorOptions,
        LaunchRequest,
    )
    from djinn_core.hookspecs.integrations import Integration
    from djinn_core.hookspecs.memory_policies import EvictionCandidate, EvictionContext, MemoryPolicy, SessionHints
    from djinn_core.hookspecs.observers import Event, Observer
    from djinn_core.hookspecs.operations_pages import (
        EventFeed,
        HttpResponse,
        OperationsPages,
        PageRequest,
        WatchedServer,
    )
    from djinn_core.hookspecs.optimizations import (
        Judge,
        Optimization,
        OptimizationContext,
        PlacementTrial,
        Trial,
    )
    from djinn_core.hookspecs.patterns import Pattern
    from djinn_core.hookspecs.placement_policies import PlacementContext, PlacementPolicy
    from djinn_core.hookspecs.quotas import Quota
    from djinn_core.hookspecs.renderers import Renderer
    from djinn_core.hookspecs.schedulers import NodePriority, Scheduler, SchedulingContext
    from djinn_core.hookspecs.transports import (
        Buffer,
        Connection,
        Frame,
        Limits,
        LinkFacts,
        Listener,
        TlsOptions,
        Transport,
        TransportCapabilities,
    )
    from djinn_core.hookspecs.weight_formats import Decoding, FileHeader, HeaderEntry, WeightFormat
    from djinn_core.hookspecs.weight_sources import (
        LocalPlace,
        ReportDownload,
        WeightFile,
        WeightPermissions,
        WeightSink,
        WeightSource,
    )
    from djinn_core.ir.arguments import arguments, slot_positions
    from djinn_core.ir.costs import Calibration, CostEstimate, Costs, DeviceCapabilities, Link, NetworkTopology
    from djinn_core.ir.graph import Edge, Graph, Node
    from djinn_core.ir.handles import storage_of
    from djinn_core.ir.placement import Placement, PlacementDecision
    from djinn_core.ir.plan import OptimizationPlan, OptimizationResult, Rewrite
    from djinn_core.ir.profile import (
        DataResidency,
        ExecutionPhase,
        Lineage,
        Modality,
        Nodes,
        PatternMatch,
        SemanticMetadata,
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
    from djinn_core.wire.executor_reports import Ready, Sessions

__all__ = [
    "API_VERSION",
    "AccessRefused",
    "ApiName",
    "AssignmentPolicy",
    "AssignmentRefusal",
    "AssignmentRequest",
    "Authenticator",
    "Buffer",
    "Calibration",
    "Compiler",
    "CompilerContext",
    "ConfigurationError",
    "Connection",
    "CostEstimate",
    "CostModel",
    "Costs",
    "Credentials",
    "DataResidency",
    "Decoding",
    "Denial",
    "Device",
    "DeviceCapabilities",
    "DeviceRuntime",
    "DjinnError",
    "DoesNotFit",
    "Edge",
    "Event",
    "EventFeed",
    "EvictionCandidate",
    "EvictionContext",
    "ExecutionPhase",
    "ExecutionSchedule",
    "ExecutorEngine",
    "ExecutorHandle",
    "ExecutorLoad",
    "ExecutorOptions",
    "Fetch",
    "FileHeader",
    "Frame",
    "Free",
    "Graph",
    "HeaderEntry",
    "HttpResponse",
    "Identity",
    "Instruction",
    "Integration",
    "InvalidStage",
    "Judge",
    "LaunchRequest",
    "Limits",
    "Lineage",
    "Link",
    "LinkFacts",
    "Listener",
    "LocalPlace",
    "MemoryPolicy",
    "Modality",
    "NetworkTopology",
    "Node",
    "NodePriority",
    "Nodes",
    "Observer",
    "OperationsPages",
    "Optimization",
    "OptimizationContext",
    "OptimizationPlan",
    "OptimizationResult",
    "PageRequest",
    "Pattern",
    "PatternMatch",
    "PipelineResult",
    "Placement",
    "PlacementContext",
    "PlacementDecision",
    "PlacementPolicy",
    "PlacementTrial",
    "PluginError",
    "Probe",
    "Program",
    "ProtocolError",
    "Quota",
    "Ready",
    "Receive",
    "RemoteError",
    "Renderer",
    "Replay",
    "ReportDownload",
    "Rewrite",
    "Run",
    "Scheduler",
    "SchedulingContext",
    "SchedulingGroup",
    "SchedulingStrategy",
    "SemanticMetadata",
    "Send",
    "SessionHints",
    "SessionLost",
    "Sessions",
    "StartupError",
    "Step",
    "Stream",
    "Substitution",
    "TenantLoad",
    "TensorMeta",
    "Tier",
    "TlsOptions",
    "Transport",
    "TransportCapabilities",
    "TransportError",
    "Trial",
    "UnsupportedOperation",
    "Upload",
    "WatchedServer",
    "WeightFile",
    "WeightFormat",
    "WeightPermissions",
    "WeightSink",
    "WeightSource",
    "WeightsUnavailable",
    "WorkloadProfile",
    "WorkloadType",
    "arguments",
    "hookimpl",
    "slot_positions",
    "storage_of",
]

_PLACES = {
    "djinn_core.hookspecs.api_names": "ApiName",
    "djinn_core.hookspecs.assignment_policies": "AssignmentPolicy AssignmentRefusal AssignmentRequest ExecutorLoad TenantLoad",
    "djinn_core.hookspecs.authenticators": "Authenticator Credentials Denial Identity",
    "djinn_core.hookspecs.compilers": "Compiler CompilerContext Replay",
    "djinn_core.hookspecs.cost_models": "CostModel Probe",
    "djinn_core.hookspecs.devices": "Device DeviceRuntime",
    "djinn_core.hookspecs.integrations": "Integration",
    "djinn_core.hookspecs.executors": "ExecutorEngine ExecutorHandle ExecutorOptions LaunchRequest",
    "djinn_core.hookspecs.memory_policies": "EvictionCandidate EvictionContext MemoryPolicy SessionHints",
    "djinn_core.hookspecs.observers": "Event Observer",
    "djinn_core.hookspecs.operations_pages": "EventFeed HttpResponse OperationsPages PageRequest WatchedServer",
    "djinn_core.hookspecs.optimizations": "Judge Optimization OptimizationContext PlacementTrial Trial",
    "djinn_core.hookspecs.patterns": "Pattern",
    "djinn_core.hookspecs.placement_policies": "PlacementContext PlacementPolicy",
    "djinn_core.hookspecs.quotas": "Quota",
    "djinn_core.hookspecs.renderers": "Renderer",
    "djinn_core.hookspecs.schedulers": "NodePriority Scheduler SchedulingContext",
    "djinn_core.hookspecs.transports": "Buffer Connection Frame Limits LinkFacts Listener TlsOptions Transport TransportCapabilities",
    "djinn_core.hookspecs.weight_formats": "Decoding FileHeader HeaderEntry WeightFormat",
    "djinn_core.hookspecs.weight_sources": "LocalPlace ReportDownload WeightFile WeightPermissions WeightSink WeightSource",
    "djinn_core.ir.arguments": "arguments slot_positions",
    "djinn_core.ir.costs": "Calibration CostEstimate Costs DeviceCapabilities Link NetworkTopology",
    "djinn_core.ir.graph": "Edge Graph Node",
    "djinn_core.ir.handles": "storage_of",
    "djinn_core.ir.placement": "Placement PlacementDecision",
    "djinn_core.ir.plan": "OptimizationPlan OptimizationResult Rewrite",
    "djinn_core.ir.profile": "DataResidency ExecutionPhase Lineage Modality Nodes PatternMatch SemanticMetadata Tier WorkloadProfile WorkloadType",
    "djinn_core.ir.program": "Instruction Program",
    "djinn_core.ir.result": "PipelineResult",
    "djinn_core.ir.schedule": "ExecutionSchedule Fetch Free Receive Run SchedulingGroup SchedulingStrategy Send Step Upload",
    "djinn_core.ir.stream": "Stream",
    "djinn_core.ir.substitution": "Substitution",
    "djinn_core.ir.values": "TensorMeta",
    "djinn_core.wire.executor_reports": "Ready Sessions",
}

if not TYPE_CHECKING:  # type checkers know the names from above
    __getattr__ = importing(__name__, _PLACES)
