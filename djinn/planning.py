"""For commands that plan programs for devices which are not connected: the stages, what they are asked, and servers' devices."""

from __future__ import annotations

from djinn_client.interception.recording.substitute import rewrite
from djinn_client.runtime.captured import Captured
from djinn_client.runtime.connecting.status import ask_named
from djinn_client.runtime.load_plugins import load_selected
from djinn_client.runtime.planning.constraints import preferred_policy, preferred_scheduler
from djinn_client.runtime.planning.run_pipeline import capabilities_of
from djinn_core.planning.pipeline import Request
from djinn_core.planning.pipeline import plan as run_stages
from djinn_core.planning.stages.placement_fit import bytes_held
from djinn_core.registry.registry import Registry
from djinn_core.wire.messages import ExecutorStatus, Status

__all__ = [
    "Captured",
    "ExecutorStatus",
    "Registry",
    "Request",
    "Status",
    "ask_named",
    "bytes_held",
    "capabilities_of",
    "load_selected",
    "preferred_policy",
    "preferred_scheduler",
    "rewrite",
    "run_stages",
]
