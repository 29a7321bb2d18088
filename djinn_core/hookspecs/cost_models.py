"""Stage 3, estimate: cost models predict the cost of a node on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn_core.hookspecs import hookspec
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities
from djinn_core.ir.graph import Graph, Node


@attrs.frozen
class Probe:
    """A small program whose run time tells a cost model how fast a device is.

    Attributes:
        name: unique among the probes of a cost model.
        prepare: allocates operands on a device, and returns the function to time: ordinary PyTorch on these operands.
        repeats: how many times the timed function repeats its work. The measured time is divided by this number.
        quick: True for the few probes that run when a device is measured in the background.
    """

    name: str
    prepare: Callable[[torch.device], Callable[[], object]]
    repeats: int = 1
    quick: bool = False


class CostModel(ABC):
    """Predict the work and time of ops. The planner calls it for the nodes of each new graph, in the client, from any thread.

    If `estimate` raises or returns a negative or infinite estimate, the planner logs a warning that names the model.
    Then it asks the next model for the remaining nodes of this graph.

    A model with `probes` has parameters that `djinn calibrate` measures on each device. The result of `fit` is stored, and is
    in `device.calibration.models[name]` when `estimate` is called. `device.calibration` is None on a device that was not measured.

    Attributes:
        name: unique among cost models.
        operations: ops without namespace and overload (`mm`) that the model knows; empty means every op.
        tolerates_growth: as in `Pattern`.
    """

    name: str
    operations: frozenset[str] = frozenset()
    tolerates_growth: bool = False

    @abstractmethod
    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Return the cost of `node` on `device`, or None to leave it to the next model."""

    def probes(self) -> Iterable[Probe]:
        """Return the programs to time; empty by default.

        Each program is timed several times. All of them together may take a few seconds.
        """
        return ()

    def fit(self, seconds: Mapping[str, float]) -> Mapping[str, Any]:
        """Return parameters as JSON values, fitted to the measured seconds of each probe (by name).

        Failed probes are missing.
        """
        del seconds
        return {}

    def background_command(self) -> Sequence[str]:
        """Return arguments of the Python interpreter for a process that measures one device; empty by default.

        The client starts this process for devices of a pool that were never measured. The first model with a command
        decides. The process has the settings of the device in its environment. It stores its results with `store_calibration`
        and ends with exit status 0. It should take seconds, use the device for at most two seconds, and yield to other work.
        """
        return ()


@hookspec
def djinn_register_cost_models(settings: Any) -> Iterable[CostModel]:
    """Return the cost models that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. For each node the planner first asks
    the models that list its op in `operations`, then the general models. Each group is sorted by name, with built-in models last.
    The first result other than None counts. A model that raises is skipped for that graph.
    """
    del settings
    raise NotImplementedError
