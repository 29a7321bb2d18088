"""Djinn: a remote accelerator as a local PyTorch device.

    import torch, djinn

    model.to("remote_accelerator:0")

Importing registers the device. What runs it is connected at first use: the servers that `configure` names, or an
executor on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn import _lazy_names
from djinn_core import __version__ as __version__
from djinn_core.errors import (
    AccessRefused,
    ConfigurationError,
    DeadlineExceeded,
    DjinnError,
    DoesNotFit,
    ForkedProcess,
    InvalidStage,
    PluginError,
    ProgramStopped,
    ProtocolError,
    QuotaExceeded,
    RemoteError,
    RemoteIndexError,
    RemoteNotImplementedError,
    RemoteOutOfMemory,
    RemoteTypeError,
    RemoteValueError,
    ServerBusy,
    SessionLost,
    StartupError,
    TransportError,
    UnsupportedOperation,
    VerificationError,
    WeightsUnavailable,
)

# What is here takes as long to import as everything else, so each name is imported when it is first asked for (`__getattr__`).
if TYPE_CHECKING:
    from djinn_client.interception.recording.capture import is_capturing
    from djinn_client.interception.runtime_interface import CacheMemory, Publication
    from djinn_client.interception.tensors.lazy_tensor import LazyTensor
    from djinn_client.notebook import load_ipython_extension
    from djinn_client.runtime.captured import capture, execute, explain, get_graph, plan
    from djinn_client.runtime.client import (
        cancel,
        configure,
        get_runtime_state,
        init,
        init_async,
        is_initialized,
        last_profile,
        register_init_hook,
        reset_stats,
        shut_down,
        stats,
        synchronize,
    )
    from djinn_client.runtime.connecting.link_measurement import topology
    from djinn_client.runtime.coordinator import Coordinator, coordinator
    from djinn_client.runtime.deadlines import deadline
    from djinn_client.runtime.kv_session import KvSession, kv_session
    from djinn_client.runtime.open_weights import RemoteWeights, open_weights, remove_weights, save_weights
    from djinn_client.runtime.published import attach, publish, published, unpublish
    from djinn_client.runtime.receiving.remote_errors import (
        RemoteAcceleratorError,
        RemoteLinAlgError,
        RemoteTorchOutOfMemory,
    )
    from djinn_client.runtime.scaling import scale
    from djinn_core.hookspecs import API_VERSION, hookimpl
    from djinn_core.ir.costs import CostEstimate, DeviceCapabilities, NetworkTopology
    from djinn_core.ir.graph import Graph
    from djinn_core.ir.placement import PlacementDecision
    from djinn_core.ir.plan import OptimizationPlan, OptimizationResult
    from djinn_core.ir.profile import (
        DataResidency,
        ExecutionPhase,
        Modality,
        PatternMatch,
        SemanticMetadata,
        WorkloadProfile,
        WorkloadType,
    )
    from djinn_core.ir.schedule import ExecutionSchedule, SchedulingGroup, SchedulingStrategy
    from djinn_core.logs import set_debug_level
    from djinn_core.planning.scheduler import Scheduler
    from djinn_profiler.timeline.events import TimelineEvent
    from djinn_profiler.timeline.profiling import Timeline, profile
    from djinn_profiler.timeline.waits import WaitReport, explain_waits
    from djinn_profiler.verification.verifying import Verification, verify

__all__ = [
    "API_VERSION",
    "AccessRefused",
    "CacheMemory",
    "ConfigurationError",
    "Coordinator",
    "CostEstimate",
    "DataResidency",
    "DeadlineExceeded",
    "DeviceCapabilities",
    "DjinnError",
    "DoesNotFit",
    "ExecutionPhase",
    "ExecutionSchedule",
    "ForkedProcess",
    "Graph",
    "InvalidStage",
    "KvSession",
    "LazyTensor",
    "Modality",
    "NetworkTopology",
    "OptimizationPlan",
    "OptimizationResult",
    "PatternMatch",
    "PlacementDecision",
    "PluginError",
    "ProgramStopped",
    "ProtocolError",
    "Publication",
    "QuotaExceeded",
    "RemoteAcceleratorError",
    "RemoteError",
    "RemoteIndexError",
    "RemoteLinAlgError",
    "RemoteNotImplementedError",
    "RemoteOutOfMemory",
    "RemoteTorchOutOfMemory",
    "RemoteTypeError",
    "RemoteValueError",
    "RemoteWeights",
    "Scheduler",
    "SchedulingGroup",
    "SchedulingStrategy",
    "SemanticMetadata",
    "ServerBusy",
    "SessionLost",
    "StartupError",
    "Timeline",
    "TimelineEvent",
    "TransportError",
    "UnsupportedOperation",
    "Verification",
    "VerificationError",
    "WaitReport",
    "WeightsUnavailable",
    "WorkloadProfile",
    "WorkloadType",
    "attach",
    "cancel",
    "capture",
    "configure",
    "coordinator",
    "deadline",
    "execute",
    "explain",
    "explain_waits",
    "get_graph",
    "get_runtime_state",
    "hookimpl",
    "init",
    "init_async",
    "is_capturing",
    "is_initialized",
    "kv_session",
    "last_profile",
    "load_ipython_extension",
    "open_weights",
    "plan",
    "profile",
    "publish",
    "published",
    "register_init_hook",
    "remove_weights",
    "reset_stats",
    "save_weights",
    "scale",
    "set_debug_level",
    "shut_down",
    "stats",
    "synchronize",
    "topology",
    "unpublish",
    "verify",
]

_PLACES = {
    "djinn_core.hookspecs": "API_VERSION hookimpl",
    "djinn_client.interception.recording.capture": "is_capturing",
    "djinn_client.interception.runtime_interface": "CacheMemory Publication",
    "djinn_client.interception.tensors.lazy_tensor": "LazyTensor",
    "djinn_core.ir.costs": "CostEstimate DeviceCapabilities NetworkTopology",
    "djinn_core.ir.graph": "Graph",
    "djinn_core.ir.placement": "PlacementDecision",
    "djinn_core.ir.plan": "OptimizationPlan OptimizationResult",
    "djinn_core.ir.profile": "DataResidency ExecutionPhase Modality PatternMatch SemanticMetadata WorkloadProfile WorkloadType",
    "djinn_core.ir.schedule": "ExecutionSchedule SchedulingGroup SchedulingStrategy",
    "djinn_core.logs": "set_debug_level",
    "djinn_client.notebook": "load_ipython_extension",
    "djinn_client.runtime.captured": "capture execute explain get_graph plan",
    "djinn_client.runtime.client": "cancel configure get_runtime_state init init_async is_initialized last_profile register_init_hook reset_stats shut_down stats synchronize",
    "djinn_client.runtime.connecting.link_measurement": "topology",
    "djinn_client.runtime.coordinator": "Coordinator coordinator",
    "djinn_client.runtime.deadlines": "deadline",
    "djinn_client.runtime.kv_session": "KvSession kv_session",
    "djinn_client.runtime.open_weights": "RemoteWeights open_weights remove_weights save_weights",
    "djinn_client.runtime.published": "attach publish published unpublish",
    "djinn_client.runtime.receiving.remote_errors": "RemoteAcceleratorError RemoteLinAlgError RemoteTorchOutOfMemory",
    "djinn_client.runtime.scaling": "scale",
    "djinn_core.planning.scheduler": "Scheduler",
}

# By folder of Djinn's repository what the package there brings, so that a name whose package is missing says which to install.
_PACKAGES = {
    "plugins/profiler": "Timeline TimelineEvent Verification WaitReport explain_waits profile verify",
}

if not TYPE_CHECKING:  # type checkers know the names from above
    __getattr__ = _lazy_names.importing(__name__, _PLACES, _PACKAGES)

    __dir__ = _lazy_names.listing(__name__)

_lazy_names.attach()
