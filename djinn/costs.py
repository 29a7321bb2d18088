"""Helpers for cost models: FLOPs and memory traffic of an op, from its metadata alone; what was measured of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import importing
from djinn_core.planning.builtins.flops import flops_of
from djinn_core.planning.builtins.memory_traffic import distinct_bytes, traffic_of
from djinn_core.planning.builtins.work import Kind, Layout, Work, work_of
from djinn_core.planning.stages.estimate import estimate

# Each name is imported when it is asked for: not every machine has both client and server.
if TYPE_CHECKING:
    from djinn_client.runtime.planning.calibrations import calibration_file, calibration_of, keep_calibration

__all__ = [
    "Kind",
    "Layout",
    "Work",
    "calibration_file",
    "calibration_of",
    "distinct_bytes",
    "estimate",
    "flops_of",
    "keep_calibration",
    "traffic_of",
    "work_of",
]

_PLACES = {
    "djinn_client.runtime.planning.calibrations": "calibration_file calibration_of keep_calibration",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)
