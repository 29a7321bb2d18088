"""Test tools for authors of plugins: conformance suites, sample graphs, and access to the open session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import lazy_names

# Some suites need the client and some the server, so each is imported on first access.
if TYPE_CHECKING:
    from djinn.testing.assignment_policies import AssignmentPolicyConformance, sample_assignments
    from djinn.testing.authenticators import AuthenticatorConformance, wrong_credentials
    from djinn.testing.builders import ProgramBuilder
    from djinn.testing.certificates import self_signed_tls
    from djinn.testing.channels import ChannelConformance
    from djinn.testing.commands import CommandConformance
    from djinn.testing.comparing import compare_results
    from djinn.testing.compilers import CompilerConformance
    from djinn.testing.contexts import optimization_context, placement_context, scheduling_context, topology
    from djinn.testing.cost_models import CostModelConformance
    from djinn.testing.devices import DeviceConformance
    from djinn.testing.executor_states import ExecutorStateMachine, run_executor_states
    from djinn.testing.executors import ExecutorConformance
    from djinn.testing.integrations import IntegrationConformance
    from djinn.testing.interception import InterceptionConformance
    from djinn.testing.observers import ObserverConformance
    from djinn.testing.op_handlers import OpHandlerConformance
    from djinn.testing.operations import OperationsServerConformance
    from djinn.testing.operators import OperatorLibraryConformance
    from djinn.testing.optimizations import OptimizationConformance
    from djinn.testing.patterns import PatternConformance
    from djinn.testing.placement_policies import PlacementPolicyConformance
    from djinn.testing.programs import sample_programs
    from djinn.testing.registration import PluginConformance
    from djinn.testing.renderers import RendererConformance
    from djinn.testing.replaying import random_graph, random_inputs, replay, replay_schedule
    from djinn.testing.routers import RouterConformance
    from djinn.testing.run_strategies import RunStrategyConformance
    from djinn.testing.samples import sample_graphs
    from djinn.testing.schedulers import SchedulerConformance
    from djinn.testing.session import (
        break_connection,
        executor_figures,
        executor_processes,
        kill_executor,
        open_connections,
        open_session,
        plans_made,
        session_name,
        unsent_instructions,
    )
    from djinn.testing.tls_transports import TlsTransportConformance
    from djinn.testing.transports import TransportConformance
    from djinn.testing.transports_stateful import TransportStateMachine, run_transport_states
    from djinn.testing.weight_formats import WeightFormatConformance
    from djinn.testing.weight_sources import SAMPLE_FILE, WeightSourceConformance, open_permitted
    from djinn_fakegpu.process import FakeGpuProcess

__all__ = [
    "SAMPLE_FILE",
    "AssignmentPolicyConformance",
    "AuthenticatorConformance",
    "ChannelConformance",
    "CommandConformance",
    "CompilerConformance",
    "CostModelConformance",
    "DeviceConformance",
    "ExecutorConformance",
    "ExecutorStateMachine",
    "FakeGpuProcess",
    "IntegrationConformance",
    "InterceptionConformance",
    "ObserverConformance",
    "OpHandlerConformance",
    "OperationsServerConformance",
    "OperatorLibraryConformance",
    "OptimizationConformance",
    "PatternConformance",
    "PlacementPolicyConformance",
    "PluginConformance",
    "ProgramBuilder",
    "RendererConformance",
    "RouterConformance",
    "RunStrategyConformance",
    "SchedulerConformance",
    "TlsTransportConformance",
    "TransportConformance",
    "TransportStateMachine",
    "WeightFormatConformance",
    "WeightSourceConformance",
    "break_connection",
    "compare_results",
    "executor_figures",
    "executor_processes",
    "kill_executor",
    "open_connections",
    "open_permitted",
    "open_session",
    "optimization_context",
    "placement_context",
    "plans_made",
    "random_graph",
    "random_inputs",
    "replay",
    "replay_schedule",
    "run_executor_states",
    "run_transport_states",
    "sample_assignments",
    "sample_graphs",
    "sample_programs",
    "scheduling_context",
    "self_signed_tls",
    "session_name",
    "topology",
    "unsent_instructions",
    "wrong_credentials",
]

_MODULES = {
    "djinn.testing.assignment_policies": "AssignmentPolicyConformance sample_assignments",
    "djinn.testing.authenticators": "AuthenticatorConformance wrong_credentials",
    "djinn.testing.builders": "ProgramBuilder",
    "djinn.testing.certificates": "self_signed_tls",
    "djinn.testing.channels": "ChannelConformance",
    "djinn.testing.commands": "CommandConformance",
    "djinn.testing.comparing": "compare_results",
    "djinn.testing.compilers": "CompilerConformance",
    "djinn.testing.contexts": "optimization_context placement_context scheduling_context topology",
    "djinn.testing.cost_models": "CostModelConformance",
    "djinn.testing.devices": "DeviceConformance",
    "djinn.testing.integrations": "IntegrationConformance",
    "djinn.testing.interception": "InterceptionConformance",
    "djinn.testing.executor_states": "ExecutorStateMachine run_executor_states",
    "djinn.testing.executors": "ExecutorConformance",
    "djinn.testing.observers": "ObserverConformance",
    "djinn.testing.op_handlers": "OpHandlerConformance",
    "djinn.testing.operations": "OperationsServerConformance",
    "djinn.testing.operators": "OperatorLibraryConformance",
    "djinn.testing.optimizations": "OptimizationConformance",
    "djinn.testing.patterns": "PatternConformance",
    "djinn.testing.placement_policies": "PlacementPolicyConformance",
    "djinn.testing.programs": "sample_programs",
    "djinn.testing.registration": "PluginConformance",
    "djinn.testing.renderers": "RendererConformance",
    "djinn.testing.replaying": "random_graph random_inputs replay replay_schedule",
    "djinn.testing.run_strategies": "RunStrategyConformance",
    "djinn.testing.samples": "sample_graphs",
    "djinn.testing.routers": "RouterConformance",
    "djinn.testing.schedulers": "SchedulerConformance",
    "djinn.testing.session": "break_connection executor_figures executor_processes kill_executor open_connections open_session plans_made session_name unsent_instructions",
    "djinn.testing.tls_transports": "TlsTransportConformance",
    "djinn.testing.transports": "TransportConformance",
    "djinn.testing.transports_stateful": "TransportStateMachine run_transport_states",
    "djinn.testing.weight_formats": "WeightFormatConformance",
    "djinn_fakegpu.process": "FakeGpuProcess",
    "djinn.testing.weight_sources": "SAMPLE_FILE WeightSourceConformance open_permitted",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
