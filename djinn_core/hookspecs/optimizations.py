"""Stage 4, optimize: optimizations rewrite the program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.ir.checked_fields import read_only
from djinn_core.ir.costs import Costs, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import MARGIN, Placement
from djinn_core.ir.plan import OptimizationPlan, OptimizationResult
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.ir.stream import ALONE, Stream


@attrs.frozen(repr=False)
class OptimizationContext(ShortRepr):
    """The input of an optimization.

    Attributes:
        graph: the graph as recorded; values and nodes keep their ids through all rewrites.
        profile: the workload that the patterns recognised.
        costs: estimated costs of the nodes.
        topology: devices and links.
        plan: the plan after the previous optimizations.
        kept: values that are still needed when the program ends.
        placement: devices of the nodes, in the second pass after placement; None in the first pass.
        resident: in the second pass, the device of each input, as in `PlacementContext`.
        copies: in the second pass, the other devices with copies of an input, as in `PlacementContext`.
        stream: the programs of this structure that are in flight.
        margin: share of the single-device time that several devices must be predicted to save, as in
            `PlacementContext`.
    """

    graph: Graph
    profile: WorkloadProfile
    costs: Costs
    topology: NetworkTopology
    plan: OptimizationPlan
    kept: frozenset[int]
    placement: Placement | None = None
    resident: Mapping[int, str] = attrs.field(factory=dict, converter=read_only)
    copies: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict, converter=read_only)
    stream: Stream = ALONE
    margin: float = MARGIN


class Optimization(ABC):
    """Rewrite a program without changing its results.

    The planner calls it once for each new graph, in the client, from any thread.

    The planner verifies each rewrite before it applies it. If `optimize` raises or breaks a rule, the planner logs a
    warning that names the optimization and leaves the plan as it was.

    Attributes:
        name: unique among optimizations.
        before: names of optimizations that must run after this one; unknown names are ignored.
        after: names of optimizations that must run before this one; unknown names are ignored.
        after_placement: True to run once more when the placement is known.
        exact: False if results may differ in rounding from those of the program as written. The setting `exact`, which
            is on by default, disables such an optimization.
        tolerates_growth: as in `Pattern`.
    """

    name: str
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    after_placement: bool = False
    exact: bool = True
    tolerates_growth: bool = False

    def wants(self, ops: frozenset[str]) -> bool:
        """Return True if a program with these ops, such as `aten::linear`, should be planned for this optimization.

        The default is True. Called for each new program of a session with one executor. If every optimization returns
        False, the program runs as recorded.
        """
        del ops
        return True

    @abstractmethod
    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a rewrite and its reason, or `applied=False` with the reason why nothing is rewritten."""


@attrs.frozen
class Trial:
    """Executor times of programs of one structure. Runs with an optimization alternate with runs without it.

    Attributes:
        optimization: name of the optimization.
        with_it: seconds of each run with the optimization, the oldest first, without warm-up runs.
        without: seconds of each run without it, the oldest first, without warm-up runs.
    """

    optimization: str
    with_it: tuple[float, ...]
    without: tuple[float, ...]


@attrs.frozen
class PlacementTrial:
    """Times of programs of one structure on one executor and over several, each from submission to result.

    Attributes:
        policy: name of the placement policy that divides the programs.
        alone: seconds of each run on one executor, the oldest first, without warm-up runs.
        apart: seconds of each run over several executors, the oldest first, without warm-up runs.
        moving: predicted seconds to copy weights to the executors that use them, and to copy moved values back.
    """

    policy: str
    alone: tuple[float, ...]
    apart: tuple[float, ...]
    moving: float = 0.0


class Judge(Optimization):
    """An optimization that decides from measured runs whether other optimizations save time.

    Without a judge, the client measures no trials.

    The client asks the first judge. It calls the methods right before a run, under the lock of the recorders: they must
    be quick. If a method raises, the client logs a warning that names the judge and keeps the plan.
    """

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False. A judge only decides about plans that other optimizations requested."""
        del ops
        return False

    def pays(self, trial: Trial) -> bool | None:
        """Return True if the optimization saves time, False if not, or None if more runs are needed.

        The default keeps every optimization.
        """
        del trial
        return True

    def spreads(self, trial: PlacementTrial) -> bool | None:
        """Return True if several executors are faster, False if not, or None if more runs are needed.

        The default keeps every placement.
        """
        del trial
        return True


@hookspec
def djinn_register_optimizations(settings: Any) -> Iterable[Optimization]:
    """Return the optimizations that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. Optimizations run once per new
    graph, in the order that `before` and `after` demand, ties by name. If an optimization raises
    or its rewrite breaks an invariant, the planner drops the rewrite and logs a warning that names the optimization.
    """
    del settings
    raise NotImplementedError
