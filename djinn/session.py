"""For commands: the open session, its device and executor, the plugins in use, and what is planned and happens in it."""

from __future__ import annotations

from djinn_core.ir.result import PipelineResult
from djinn_core.runtime.client import (
    device,
    executor_process,
    observed_by,
    record_plans,
    registry,
    settings,
    whole_programs,
)
from djinn_core.wire.messages import DeviceInfo

__all__ = [
    "DeviceInfo",
    "PipelineResult",
    "device",
    "executor_process",
    "observed_by",
    "record_plans",
    "registry",
    "settings",
    "whole_programs",
]
