"""For the tests of plugins: one suite to subclass for each kind, graphs to try, and a builder for more of them."""

from __future__ import annotations

from djinn_core.conformance.builders import ProgramBuilder
from djinn_core.conformance.certificates import self_signed_tls
from djinn_core.conformance.commands import CommandConformance
from djinn_core.conformance.comparing import compare_results
from djinn_core.conformance.compilers import CompilerConformance
from djinn_core.conformance.contexts import optimization_context, placement_context, scheduling_context, topology
from djinn_core.conformance.costs import CostModelConformance
from djinn_core.conformance.devices import DeviceConformance
from djinn_core.conformance.integrations import IntegrationConformance
from djinn_core.conformance.interception import InterceptorConformance
from djinn_core.conformance.memory import MemoryPolicyConformance, sample_evictions
from djinn_core.conformance.observers import ObserverConformance
from djinn_core.conformance.optimizations import OptimizationConformance
from djinn_core.conformance.patterns import PatternConformance
from djinn_core.conformance.placement import PlacementPolicyConformance
from djinn_core.conformance.programs import sample_programs
from djinn_core.conformance.registration import PluginConformance
from djinn_core.conformance.replaying import random_graph, random_inputs, replay, replay_schedule
from djinn_core.conformance.samples import sample_graphs
from djinn_core.conformance.schedulers import SchedulerConformance
from djinn_core.conformance.tls_transports import TlsTransportConformance
from djinn_core.conformance.transports import TransportConformance

__all__ = [
    "CommandConformance",
    "CompilerConformance",
    "CostModelConformance",
    "DeviceConformance",
    "IntegrationConformance",
    "InterceptorConformance",
    "MemoryPolicyConformance",
    "ObserverConformance",
    "OptimizationConformance",
    "PatternConformance",
    "PlacementPolicyConformance",
    "PluginConformance",
    "ProgramBuilder",
    "SchedulerConformance",
    "TlsTransportConformance",
    "TransportConformance",
    "compare_results",
    "optimization_context",
    "placement_context",
    "random_graph",
    "random_inputs",
    "replay",
    "replay_schedule",
    "sample_evictions",
    "sample_graphs",
    "sample_programs",
    "scheduling_context",
    "self_signed_tls",
    "topology",
]
