"""Contract of plugins: the hook marker, base classes, their argument and result types, and building blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import lazy_names
from djinn_core.hookspecs import API_VERSION, hookimpl

# A plugin imports only the names that it uses (`__getattr__`).
if TYPE_CHECKING:
    from djinn_client.hookspecs.channels import (
        ChannelContext,
        ChannelWrapper,
        StandbyServer,
        WrappedChannel,
    )
    from djinn_client.hookspecs.client_channel import ClientChannel
    from djinn_client.hookspecs.integrations import Integration
    from djinn_client.hookspecs.interception import Interception
    from djinn_client.hookspecs.renderers import Renderer
    from djinn_client.hookspecs.routers import Executor, Executors, JoinedReplies, Part, PendingReply, Router
    from djinn_client.interception.on_import import rebind
    from djinn_client.runtime.plugins import is_disabled
    from djinn_client.sink import DescribedValue, Facts, OpHandler, Sink, Submission, SubmissionReply
    from djinn_core.hookspecs.cost_models import CostModel, Probe
    from djinn_core.hookspecs.observers import Event, Observer
    from djinn_core.hookspecs.operators import CastPolicy, OperatorLibrary
    from djinn_core.hookspecs.optimizations import Judge, Optimization, OptimizationContext, PlacementTrial, Trial
    from djinn_core.hookspecs.patterns import Pattern
    from djinn_core.hookspecs.placement_policies import PlacementContext, PlacementPolicy
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
    from djinn_core.logs import get_logger
    from djinn_core.protocol.net.socket_transports import SocketTransport
    from djinn_core.protocol.net.sockets import SocketConnection, SocketListener
    from djinn_core.protocol.net.streams import StreamConnection
    from djinn_core.protocol.net.tls_contexts import client_context, server_context
    from djinn_core.registry.version import djinn_version
    from djinn_core.wire.executor_reports import Ready, Sessions
    from djinn_core.wire.frames import FrameDecoder, encode_frame
    from djinn_launchers.holder import ExecutorHolder
    from djinn_launchers.piped_handle import PipedHandle
    from djinn_launchers.piped_holder import holder_command
    from djinn_server.hookspecs.assignment_policies import (
        AssignmentPolicy,
        AssignmentRefusal,
        AssignmentRequest,
        ExecutorLoad,
        TenantLoad,
    )
    from djinn_server.hookspecs.authenticators import Authenticator, Credentials, Denial, Identity
    from djinn_server.hookspecs.compilers import Compiler, CompilerContext, Replay
    from djinn_server.hookspecs.devices import Device, DeviceRuntime
    from djinn_server.hookspecs.executors import (
        ExecutorEngine,
        ExecutorHandle,
        ExecutorOptions,
        LaunchedExecutor,
        LaunchRequest,
    )
    from djinn_server.hookspecs.operations import OperationsAddress, OperationsServer, ServerMetrics, WatchedServer
    from djinn_server.hookspecs.quotas import Quota
    from djinn_server.hookspecs.run_strategies import (
        JointRun,
        Replacement,
        RunOffer,
        RunResults,
        RunStrategy,
        StrategyContext,
        StrategyRun,
        TemplateFacts,
        TemplateOp,
    )
    from djinn_server.hookspecs.weight_formats import Decoding, FileHeader, HeaderEntry, WeightFormat
    from djinn_server.hookspecs.weight_sources import (
        FileRoom,
        LocalPlace,
        NamingSource,
        ReportDownload,
        WeightFile,
        WeightPermissions,
        WeightSink,
        WeightSource,
    )
    from djinn_server.launch.engines import LocalEngine
    from djinn_strategies.compiling.compile_worker import CompileProcess
    from djinn_strategies.compiling.packing import pack, unpack

__all__ = [
    "API_VERSION",
    "AssignmentPolicy",
    "AssignmentRefusal",
    "AssignmentRequest",
    "Authenticator",
    "Buffer",
    "CastPolicy",
    "ChannelContext",
    "ChannelWrapper",
    "ClientChannel",
    "CompileProcess",
    "Compiler",
    "CompilerContext",
    "Connection",
    "CostModel",
    "Credentials",
    "Decoding",
    "Denial",
    "DescribedValue",
    "Device",
    "DeviceRuntime",
    "Event",
    "Executor",
    "ExecutorEngine",
    "ExecutorHandle",
    "ExecutorHolder",
    "ExecutorLoad",
    "ExecutorOptions",
    "Executors",
    "Facts",
    "FileHeader",
    "FileRoom",
    "Frame",
    "FrameDecoder",
    "HeaderEntry",
    "Identity",
    "Integration",
    "Interception",
    "JoinedReplies",
    "JointRun",
    "Judge",
    "LaunchRequest",
    "LaunchedExecutor",
    "Limits",
    "LinkFacts",
    "Listener",
    "LocalEngine",
    "LocalPlace",
    "NamingSource",
    "NodePriority",
    "Observer",
    "OpHandler",
    "OperationsAddress",
    "OperationsServer",
    "OperatorLibrary",
    "Optimization",
    "OptimizationContext",
    "Part",
    "Pattern",
    "PendingReply",
    "PipedHandle",
    "PlacementContext",
    "PlacementPolicy",
    "PlacementTrial",
    "Probe",
    "Quota",
    "Ready",
    "Renderer",
    "Replacement",
    "Replay",
    "ReportDownload",
    "Router",
    "RunOffer",
    "RunResults",
    "RunStrategy",
    "Scheduler",
    "SchedulingContext",
    "ServerMetrics",
    "Sessions",
    "Sink",
    "SocketConnection",
    "SocketListener",
    "SocketTransport",
    "StandbyServer",
    "StrategyContext",
    "StrategyRun",
    "StreamConnection",
    "Submission",
    "SubmissionReply",
    "TemplateFacts",
    "TemplateOp",
    "TenantLoad",
    "TlsOptions",
    "Transport",
    "TransportCapabilities",
    "Trial",
    "WatchedServer",
    "WeightFile",
    "WeightFormat",
    "WeightPermissions",
    "WeightSink",
    "WeightSource",
    "WrappedChannel",
    "client_context",
    "djinn_version",
    "encode_frame",
    "get_logger",
    "holder_command",
    "hookimpl",
    "is_disabled",
    "pack",
    "rebind",
    "server_context",
    "unpack",
]

_MODULES = {
    "djinn_client.interception.on_import": "rebind",
    "djinn_client.runtime.plugins": "is_disabled",
    "djinn_server.hookspecs.assignment_policies": "AssignmentPolicy AssignmentRefusal AssignmentRequest ExecutorLoad TenantLoad",
    "djinn_server.hookspecs.authenticators": "Authenticator Credentials Denial Identity",
    "djinn_client.hookspecs.channels": "ChannelContext ChannelWrapper StandbyServer WrappedChannel",
    "djinn_client.hookspecs.client_channel": "ClientChannel",
    "djinn_server.hookspecs.compilers": "Compiler CompilerContext Replay",
    "djinn_core.hookspecs.cost_models": "CostModel Probe",
    "djinn_server.hookspecs.devices": "Device DeviceRuntime",
    "djinn_server.hookspecs.executors": "ExecutorEngine ExecutorHandle ExecutorOptions LaunchRequest LaunchedExecutor",
    "djinn_client.hookspecs.integrations": "Integration",
    "djinn_client.hookspecs.interception": "Interception",
    "djinn_client.sink": "DescribedValue Facts OpHandler Sink Submission SubmissionReply",
    "djinn_core.hookspecs.observers": "Event Observer",
    "djinn_server.hookspecs.operations": "OperationsAddress OperationsServer ServerMetrics WatchedServer",
    "djinn_core.hookspecs.operators": "CastPolicy OperatorLibrary",
    "djinn_core.hookspecs.optimizations": "Judge Optimization OptimizationContext PlacementTrial Trial",
    "djinn_core.hookspecs.patterns": "Pattern",
    "djinn_core.hookspecs.placement_policies": "PlacementContext PlacementPolicy",
    "djinn_server.hookspecs.quotas": "Quota",
    "djinn_client.hookspecs.renderers": "Renderer",
    "djinn_client.hookspecs.routers": "Executor Executors JoinedReplies Part PendingReply Router",
    "djinn_server.hookspecs.run_strategies": "JointRun Replacement RunOffer RunResults RunStrategy StrategyContext StrategyRun TemplateFacts TemplateOp",
    "djinn_core.hookspecs.schedulers": "NodePriority Scheduler SchedulingContext",
    "djinn_core.hookspecs.transports": "Buffer Connection Frame Limits LinkFacts Listener TlsOptions Transport TransportCapabilities",
    "djinn_server.hookspecs.weight_formats": "Decoding FileHeader HeaderEntry WeightFormat",
    "djinn_server.hookspecs.weight_sources": "FileRoom LocalPlace NamingSource ReportDownload WeightFile WeightPermissions WeightSink WeightSource",
    "djinn_core.logs": "get_logger",
    "djinn_core.protocol.net.socket_transports": "SocketTransport",
    "djinn_core.protocol.net.sockets": "SocketConnection SocketListener",
    "djinn_core.protocol.net.streams": "StreamConnection",
    "djinn_core.protocol.net.tls_contexts": "client_context server_context",
    "djinn_core.registry.version": "djinn_version",
    "djinn_core.wire.executor_reports": "Ready Sessions",
    "djinn_core.wire.frames": "FrameDecoder encode_frame",
    "djinn_strategies.compiling.compile_worker": "CompileProcess",
    "djinn_strategies.compiling.packing": "pack unpack",
    "djinn_server.launch.engines": "LocalEngine",
    "djinn_launchers.holder": "ExecutorHolder",
    "djinn_launchers.piped_handle": "PipedHandle",
    "djinn_launchers.piped_holder": "holder_command",
}

if not TYPE_CHECKING:  # type checkers know the names from above
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
