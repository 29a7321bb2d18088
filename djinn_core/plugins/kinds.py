"""The kinds of plugin: one for each hook, in pipeline order, named like the folders under `plugins/`."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import attrs

from djinn_core.hookspecs import (
    compilers,
    costs,
    devices,
    interception,
    observers,
    optimizations,
    patterns,
    placement,
    schedulers,
    transports,
)


@attrs.frozen
class Kind:
    """One kind of plugin.

    Attributes:
        name: what `djinn plugins` shows.
        objects: what its hook returns, in the plural, as in `Registry` and in the name of the hook.
        protocol: what each of these objects must satisfy.
        specification: the module that declares the hook.
    """

    name: str
    objects: str
    protocol: type
    specification: ModuleType

    @property
    def hook(self) -> str:
        """Name of the hook."""
        return f"djinn_register_{self.objects}"


KINDS: Final[tuple[Kind, ...]] = (
    Kind("interception", "interceptors", interception.Interceptor, interception),
    Kind("patterns", "patterns", patterns.Pattern, patterns),
    Kind("costs", "cost_models", costs.CostModel, costs),
    Kind("optimizations", "optimizations", optimizations.Optimization, optimizations),
    Kind("placement", "placement_policies", placement.PlacementPolicy, placement),
    Kind("schedulers", "schedulers", schedulers.ScheduleMaker, schedulers),
    Kind("transports", "transports", transports.Transport, transports),
    Kind("devices", "devices", devices.Device, devices),
    Kind("compilers", "compilers", compilers.Compiler, compilers),
    Kind("observers", "observers", observers.Observer, observers),
)

EVERY_KIND: Final = frozenset(kind.name for kind in KINDS)
# Which hooks are called in which process, as the docstrings of the hooks promise.
CLIENT_KINDS: Final = EVERY_KIND - {"devices", "compilers"}
GATEWAY_KINDS: Final = frozenset({"transports", "devices"})
EXECUTOR_KINDS: Final = GATEWAY_KINDS | {"compilers"}
