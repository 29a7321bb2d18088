"""For commands: the open session, its device and executor, the plugins in use, what is planned and happens in it, and users' scripts."""

from __future__ import annotations

from djinn_client.cli.script import Script
from djinn_client.runtime.client import (
    device,
    executor_process,
    observed_by,
    record_plans,
    registry,
    settings,
    whole_programs,
)
from djinn_core.ir.result import PipelineResult
from djinn_core.wire.messages import DeviceInfo

__all__ = [
    "DeviceInfo",
    "PipelineResult",
    "Script",
    "device",
    "executor_process",
    "observed_by",
    "record_plans",
    "registry",
    "settings",
    "whole_programs",
]
