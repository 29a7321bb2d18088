"""Stage 3, estimate: cost models say what a node costs on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from djinn_core.hookspecs import hookspec
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities
from djinn_core.ir.graph import Graph, Node


@runtime_checkable
class CostModel(Protocol):
    """Predicts work and time.

    Attributes:
        name: unique among cost models.
        operations: ops without namespace and overload that it knows; empty means every op.
    """

    name: str
    operations: frozenset[str]

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Cost of `node` on `device`, or None to leave it to the next model."""


@attrs.frozen
class Probe:
    """A program whose time tells a cost model something of the device that runs it.

    Attributes:
        name: unique among the probes of a cost model.
        prepare: makes operands on the device that it is given, and returns what is timed: ordinary PyTorch on them.
        repeats: how many times the timed function does the same; its time is divided by that.
        quick: True for the few probes that are timed if a device is measured in the background.
    """

    name: str
    prepare: Callable[[torch.device], Callable[[], object]]
    repeats: int = 1
    quick: bool = False


@runtime_checkable
class CalibratedCostModel(CostModel, Protocol):
    """A cost model with parameters that are measured on each device, by `djinn calibrate`.

    What `fit` made is kept, and is in `device.calibration.models[name]` when `estimate` is called. `calibration` is None
    where nothing was measured yet.
    """

    def probes(self) -> Iterable[Probe]:
        """Operations to time. Each is timed several times, in turns with all others; together they may take a few seconds."""

    def fit(self, seconds: Mapping[str, float]) -> Mapping[str, Any]:
        """Parameters, as JSON holds them, from the time of each probe by its name. A probe that failed is not there."""


@runtime_checkable
class BackgroundCalibrated(Protocol):
    """Optional member of a cost model, with which devices are measured at first use. The first model that has it is asked.

    The process has the settings of the device in its environment. It keeps its results with `keep_calibration` and ends with 0. It
    should take seconds, in which the device works for one or two, and yield to other work.
    """

    def background_command(self) -> Sequence[str]:
        """Arguments of the Python interpreter for a process that measures one device."""


@hookspec
def djinn_register_cost_models(settings: Any) -> Iterable[CostModel]:
    """Return the cost models that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. For each node the models
    that name its op are asked first, then the general ones, each group in order of name, built-ins last; the first
    result that is not None counts. A model that raises is skipped for that graph with a warning that names it. One that
    satisfies `CalibratedCostModel` as well is measured by `djinn calibrate`. Since API version 1.
    """
    del settings
    raise NotImplementedError
