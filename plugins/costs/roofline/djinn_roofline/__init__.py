"""Predicts how long programs take, from what was measured of each device."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import CostModel, hookimpl
from djinn_roofline.model import MeasuredRoofline

djinn_api_version = 1


@hookimpl
def djinn_register_cost_models() -> Iterable[CostModel]:
    """The cost model `measured_roofline`."""
    return [MeasuredRoofline()]
