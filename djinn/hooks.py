"""Plugin API: the hook marker, the Protocols, and the values that they take and return."""

from __future__ import annotations

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
from djinn_core.hookspecs.admission import AdmissionDelay, AdmissionPolicy, AdmissionRefusal, AdmissionRequest
from djinn_core.hookspecs.assignment import (
    AssignmentPolicy,
    AssignmentRefusal,
    AssignmentRequest,
    ExecutorLoad,
    TenantLoad,
)
from djinn_core.hookspecs.authentication import Authenticator, Credentials, Denial, Identity
from djinn_core.hookspecs.compilers import Compiler, CompilerContext, Replay
from djinn_core.hookspecs.costs import BackgroundCalibrated, CalibratedCostModel, CostModel, Probe
from djinn_core.hookspecs.devices import Device, DeviceRuntime, Timekeeper
from djinn_core.hookspecs.growth import GrowthTolerant
from djinn_core.hookspecs.integrations import Integration
from djinn_core.hookspecs.interception import Interceptor
from djinn_core.hookspecs.launchers import Badge, ExecutorOptions, Launched, Launcher, LaunchWish
from djinn_core.hookspecs.memory import EvictionCandidate, EvictionContext, MemoryPolicy, SessionHints
from djinn_core.hookspecs.observers import Event, Observer, TracingObserver
from djinn_core.hookspecs.operations import EventFeed, HttpResponse, OperationsPages, PageRequest, WatchedServer
from djinn_core.hookspecs.optimizations import (
    Judge,
    Optimization,
    OptimizationContext,
    PlacementJudge,
    PlacementTrial,
    RoundingOptimization,
    Trial,
)
from djinn_core.hookspecs.patterns import Pattern
from djinn_core.hookspecs.placement import PlacementContext, PlacementPolicy, PreferredPolicy
from djinn_core.hookspecs.quotas import Quota
from djinn_core.hookspecs.renderers import Renderer
from djinn_core.hookspecs.schedulers import PreferredScheduler, ScheduleMaker, SchedulingContext
from djinn_core.hookspecs.server_observers import ServerEvent, ServerObserver
from djinn_core.hookspecs.transports import (
    Buffer,
    Connection,
    Frame,
    Holding,
    Limits,
    LinkFacts,
    LinkMeasured,
    Listener,
    PeerCertified,
    PeerNamed,
    SecurableTransport,
    TlsOptions,
    Transport,
    TransportCapabilities,
)
from djinn_core.hookspecs.weights import (
    MappableFile,
    WeightFile,
    WeightPermissions,
    WeightSink,
    WeightSource,
    WritableSource,
)
from djinn_core.ir.arguments import arguments, slot_positions
from djinn_core.ir.costs import Calibration, CostEstimate, Costs, DeviceCapabilities, Link, NetworkTopology
from djinn_core.ir.graph import Edge, Graph, Node
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
from djinn_core.ir.values import TensorMeta, storage_of
from djinn_core.wire.executor_reports import Ready, Sessions

__all__ = [
    "API_VERSION",
    "AccessRefused",
    "AdmissionDelay",
    "AdmissionPolicy",
    "AdmissionRefusal",
    "AdmissionRequest",
    "AssignmentPolicy",
    "AssignmentRefusal",
    "AssignmentRequest",
    "Authenticator",
    "BackgroundCalibrated",
    "Badge",
    "Buffer",
    "CalibratedCostModel",
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
    "ExecutorLoad",
    "ExecutorOptions",
    "Fetch",
    "Frame",
    "Free",
    "Graph",
    "GrowthTolerant",
    "Holding",
    "HttpResponse",
    "Identity",
    "Instruction",
    "Integration",
    "Interceptor",
    "InvalidStage",
    "Judge",
    "LaunchWish",
    "Launched",
    "Launcher",
    "Limits",
    "Lineage",
    "Link",
    "LinkFacts",
    "LinkMeasured",
    "Listener",
    "MappableFile",
    "MemoryPolicy",
    "Modality",
    "NetworkTopology",
    "Node",
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
    "PeerCertified",
    "PeerNamed",
    "PipelineResult",
    "Placement",
    "PlacementContext",
    "PlacementDecision",
    "PlacementJudge",
    "PlacementPolicy",
    "PlacementTrial",
    "PluginError",
    "PreferredPolicy",
    "PreferredScheduler",
    "Probe",
    "Program",
    "ProtocolError",
    "Quota",
    "Ready",
    "Receive",
    "RemoteError",
    "Renderer",
    "Replay",
    "Rewrite",
    "RoundingOptimization",
    "Run",
    "ScheduleMaker",
    "SchedulingContext",
    "SchedulingGroup",
    "SchedulingStrategy",
    "SecurableTransport",
    "SemanticMetadata",
    "Send",
    "ServerEvent",
    "ServerObserver",
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
    "Timekeeper",
    "TlsOptions",
    "TracingObserver",
    "Transport",
    "TransportCapabilities",
    "TransportError",
    "Trial",
    "UnsupportedOperation",
    "Upload",
    "WatchedServer",
    "WeightFile",
    "WeightPermissions",
    "WeightSink",
    "WeightSource",
    "WeightsUnavailable",
    "WorkloadProfile",
    "WorkloadType",
    "WritableSource",
    "arguments",
    "hookimpl",
    "slot_positions",
    "storage_of",
]
