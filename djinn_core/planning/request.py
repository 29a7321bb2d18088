"""Inputs of planning, apart from the program: the plugins, and a `Request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.hookspecs.optimizations import Optimization
from djinn_core.hookspecs.patterns import Pattern
from djinn_core.hookspecs.placement_policies import PlacementPolicy
from djinn_core.hookspecs.schedulers import Scheduler
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.placement import MARGIN
from djinn_core.ir.result import Stage
from djinn_core.ir.stream import ALONE, Stream
from djinn_core.ir.substitution import RecipeLookup, no_recipe_locations
from djinn_core.planning.substituting import Rewrite


class Plugins(Protocol):
    """The part of the registry that planning needs."""

    @property
    def patterns(self) -> Sequence[Pattern]:
        """Patterns for `annotate`."""

    @property
    def cost_models(self) -> Sequence[CostModel]:
        """Cost models for `estimate`."""

    @property
    def optimizations(self) -> Sequence[Optimization]:
        """Optimizations for `optimize`."""

    @property
    def placement_policies(self) -> Sequence[PlacementPolicy]:
        """Placement policies; `place` uses one of them."""

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """Schedulers; `schedule` uses one of them."""


class PluginOverrides:
    """A view of `plugins` with some members replaced, such as the cost models."""

    def __init__(self, plugins: Plugins, **replacements: Sequence[Any]) -> None:
        """Replace members of `plugins`. Each replacement has the name of its member."""
        self._plugins = plugins
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugins, name)


@attrs.frozen
class Request:
    """Everything that a plan depends on, apart from the program and the plugins.

    Attributes:
        topology: devices and links.
        resident: device id by value, for inputs that already are on a device.
        copies: ids of the other devices that hold a copy, by input value.
        exact: True to exclude optimizations that may round differently.
        fetch: values that the client requests after the program.
        until: the last stage to run.
        placement_policy: name of the placement policy to use.
        scheduler: name of the scheduler to use.
        pins: pairs of a pattern of module paths and a device, for policies that follow them.
        memory_limits: the most bytes that the program may hold at once on a device, by device id.
        latency_target: seconds in which the program should complete; 0 for as soon as possible.
        stream: the programs of this structure that are in flight.
        hints: facts for the stages after `annotate`, in addition to the hints of patterns.
        locate_recipe: function that returns the devices that hold the values of a recipe, or None if they were not
            computed yet.
        margin: as in `PlacementContext`.
        rewrite: function that records substitutions of optimizations, or None to ignore substitutions.
    """

    topology: NetworkTopology
    resident: Mapping[int, str] = attrs.field(factory=dict)
    fetch: tuple[int, ...] = ()
    until: Stage = "schedule"
    placement_policy: str = "single"
    scheduler: str = "sequential"
    copies: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict)
    exact: bool = True
    pins: tuple[tuple[str, str], ...] = ()
    memory_limits: Mapping[str, int] = attrs.field(factory=dict)
    latency_target: float = 0.0
    stream: Stream = ALONE
    hints: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    locate_recipe: RecipeLookup = attrs.field(default=no_recipe_locations, eq=False)
    margin: float = MARGIN
    rewrite: Rewrite | None = attrs.field(default=None, eq=False, repr=False)


def preferred(offered: Sequence[PlacementPolicy] | Sequence[Scheduler], otherwise: str) -> str:
    """Return the name of the policy or scheduler with the greatest preference; ties by name.

    If none has a preference, return `otherwise`.
    """
    candidates = [(-plugin.preference, plugin.name) for plugin in offered if plugin.preference is not None]
    return min(candidates)[1] if candidates else otherwise


def selected_optimizations(plugins: Plugins, exact: bool) -> tuple[Optimization, ...]:
    """Return the optimizations that may run: all, or with `exact` only the exact ones."""
    return tuple(o for o in plugins.optimizations if o.exact or not exact)


def growth_intolerant_plugins(plugins: Plugins, *, exact: bool, policy: str, scheduler: str) -> tuple[str, ...]:
    """Return plugins in use that do not declare `tolerates_growth`, by kind and name.

    With such plugins, a plan serves fewer sizes. A policy or scheduler counts only if it is chosen. `exact` is as in
    `Request`.
    """
    plugins_in_use: list[tuple[str, Any]] = [
        *(("pattern", p) for p in plugins.patterns),
        *(("cost model", m) for m in plugins.cost_models),
        *(("optimization", o) for o in selected_optimizations(plugins, exact)),
        *(("placement policy", p) for p in plugins.placement_policies if p.name == policy),
        *(("scheduler", s) for s in plugins.schedulers if s.name == scheduler),
    ]
    return tuple(f"{kind} {plugin.name!r}" for kind, plugin in plugins_in_use if not plugin.tolerates_growth)
