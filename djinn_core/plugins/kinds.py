"""The kinds of plugin: one for each hook, in pipeline order, named like the folders under `plugins/` and the modules of the hooks."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final, get_type_hints

import attrs


@attrs.frozen
class Kind:
    """One kind of plugin.

    What declares its hook is imported when it is asked for: that of commands needs no PyTorch.

    Attributes:
        name: what `djinn plugins` shows, and the module in `djinn_core.hookspecs` that declares its hook.
        objects: what its hook returns, in the plural, as in `Registry` and in the name of the hook.
        wanted: name of the type that each of these objects must satisfy, as that module has it.
        optional: name of a Protocol whose members the objects may leave out; empty where there is none.
    """

    name: str
    objects: str
    wanted: str
    optional: str = ""

    @property
    def hook(self) -> str:
        """Name of the hook."""
        return f"djinn_register_{self.objects}"

    @property
    def specification(self) -> ModuleType:
        """The module that declares the hook."""
        return importlib.import_module(f"djinn_core.hookspecs.{self.name}")

    @property
    def optional_members(self) -> dict[str, Any]:
        """Types of the attributes that objects of the kind may have, by name."""
        return get_type_hints(vars(self.specification)[self.optional]) if self.optional else {}

    @property
    def protocol(self) -> type:
        """The type that each object of the kind must satisfy: a Protocol, or a class of another library."""
        found: type = vars(self.specification)[self.wanted]
        return found


KINDS: Final[tuple[Kind, ...]] = (
    Kind("interception", "interceptors", "Interceptor"),
    Kind("integrations", "integrations", "Integration"),
    Kind("patterns", "patterns", "Pattern"),
    Kind("costs", "cost_models", "CostModel"),
    Kind("optimizations", "optimizations", "Optimization"),
    Kind("placement", "placement_policies", "PlacementPolicy", "PreferredPolicy"),
    Kind("schedulers", "schedulers", "ScheduleMaker", "PreferredScheduler"),
    Kind("transports", "transports", "Transport"),
    Kind("devices", "devices", "Device"),
    Kind("compilers", "compilers", "Compiler"),
    Kind("memory", "memory_policies", "MemoryPolicy"),
    Kind("observers", "observers", "Observer"),
    Kind("renderers", "renderers", "Renderer"),
    Kind("commands", "commands", "Command"),
)

EVERY_KIND: Final = frozenset(kind.name for kind in KINDS)
# Which hooks are called in which process, as the docstrings of the hooks promise.
COMMAND_KINDS: Final = frozenset({"commands"})
CLIENT_KINDS: Final = EVERY_KIND - {"devices", "compilers", "memory"} - COMMAND_KINDS
GATEWAY_KINDS: Final = frozenset({"transports", "devices"})
EXECUTOR_KINDS: Final = GATEWAY_KINDS | {"compilers", "memory"}
