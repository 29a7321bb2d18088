"""Names that papers about Djinn's design and early descriptions use. docs/api.md lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import lazy_names

# Each name is imported on first access (`__getattr__`).
if TYPE_CHECKING:
    from djinn_client.interception.recording.recorder import is_capturing
    from djinn_client.interception.tensors.lazy_tensor import LazyTensor
    from djinn_client.runtime.client import get_runtime_state, init_async, is_initialized, register_init_hook
    from djinn_commands.servers.coordinator import Coordinator, coordinator
    from djinn_core.ir.profile import WorkloadProfile, WorkloadType
    from djinn_core.logs import set_debug_level
    from djinn_profiler.plans.scheduler import Scheduler
    from djinn_profiler.semantic_metadata import SemanticMetadata
    from djinn_profiler.semantics import MetadataRegistry, PatternRegistry, SemanticAnalyzer

__all__ = [
    "Coordinator",
    "LazyTensor",
    "MetadataRegistry",
    "PatternRegistry",
    "Scheduler",
    "SemanticAnalyzer",
    "SemanticMetadata",
    "WorkloadProfile",
    "WorkloadType",
    "coordinator",
    "get_runtime_state",
    "init_async",
    "is_capturing",
    "is_initialized",
    "register_init_hook",
    "set_debug_level",
]

_MODULES = {
    "djinn_client.interception.recording.recorder": "is_capturing",
    "djinn_client.interception.tensors.lazy_tensor": "LazyTensor",
    "djinn_client.runtime.client": "get_runtime_state init_async is_initialized register_init_hook",
    "djinn_commands.servers.coordinator": "Coordinator coordinator",
    "djinn_profiler.semantics": "MetadataRegistry PatternRegistry SemanticAnalyzer",
    "djinn_core.ir.profile": "WorkloadProfile WorkloadType",
    "djinn_profiler.semantic_metadata": "SemanticMetadata",
    "djinn_core.logs": "set_debug_level",
    "djinn_profiler.plans.scheduler": "Scheduler",
}

if not TYPE_CHECKING:  # type checkers know the names from above
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
