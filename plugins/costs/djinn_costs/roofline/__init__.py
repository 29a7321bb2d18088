"""Predict times of programs from measurements of the device: a cost model, `djinn calibrate` and `djinn validate`.

`djinn --help` imports this module. Therefore the module imports PyTorch only in functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from djinn.hooks import CostModel

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_cost_models() -> Iterable[CostModel]:
    """Register the cost model `measured_roofline`."""
    from djinn_costs.roofline.model import MeasuredRoofline

    return [MeasuredRoofline()]


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """Register the commands that measure a device and that validate predictions."""
    from djinn_costs.roofline.calibrate_command import calibrate
    from djinn_costs.roofline.validate_command import validate

    return [calibrate, validate]
