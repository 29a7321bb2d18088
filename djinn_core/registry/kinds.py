"""The kinds of plugin: one for each hook, in pipeline order."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any, Final, get_type_hints

import msgspec


class Kind(msgspec.Struct, frozen=True):
    """One kind of plugin.

    What declares its hook is imported when it is asked for: that of commands needs no PyTorch.

    Attributes:
        name: what its hook returns, in the plural: the name in `djinn plugins`, in `Registry`, in the name of the hook, and of the
            module in `djinn_core.hookspecs` that declares it.
        wanted: name of the type that each of these objects must satisfy, as that module has it.
        processes: the processes in which its hook is called: `client`, `gateway`, `executor`, or `command`, the command `djinn`.
        optional: name of a Protocol whose members the objects may leave out; empty if there is none.
    """

    name: str
    wanted: str
    processes: tuple[str, ...] = ("client",)
    optional: str = ""

    @property
    def hook(self) -> str:
        """Name of the hook."""
        return f"djinn_register_{self.name}"

    @property
    def specification(self) -> ModuleType:
        """The module that declares the hook."""
        return importlib.import_module(f"djinn_core.hookspecs.{self.name}")

    @property
    def optional_members(self) -> dict[str, Any]:
        """Types of the attributes that objects of the kind may have, by name."""
        return _types_of(vars(self.specification)[self.optional]) if self.optional else {}

    @property
    def protocol(self) -> type:
        """The type that each object of the kind must satisfy: a Protocol, or a class of another library."""
        found: type = vars(self.specification)[self.wanted]
        return found


@cache
def _types_of(protocol: type) -> dict[str, Any]:
    return get_type_hints(protocol)


INTEGRATIONS: Final = "integrations"
KINDS: Final[tuple[Kind, ...]] = (
    Kind(INTEGRATIONS, "Integration"),
    Kind("patterns", "Pattern"),
    Kind("cost_models", "CostModel"),
    Kind("optimizations", "Optimization"),
    Kind("placement_policies", "PlacementPolicy"),
    Kind("schedulers", "Scheduler"),
    Kind("transports", "Transport", ("client", "gateway", "executor")),
    Kind("executors", "ExecutorEngine", ("client", "gateway")),
    Kind("devices", "Device", ("gateway", "executor")),
    Kind("compilers", "Compiler", ("executor",)),
    Kind("memory_policies", "MemoryPolicy", ("executor",)),
    Kind("weight_sources", "WeightSource", ("executor",)),
    Kind("weight_formats", "WeightFormat", ("executor",)),
    Kind("authenticators", "Authenticator", ("gateway",)),
    Kind("assignment_policies", "AssignmentPolicy", ("gateway",)),
    Kind("operations_pages", "OperationsPages", ("gateway",)),
    Kind("observers", "Observer", ("client", "gateway", "executor")),
    Kind("renderers", "Renderer"),
    Kind("api_names", "ApiName"),
    Kind("commands", "Command", ("command",)),
)

EVERY_KIND: Final = frozenset(kind.name for kind in KINDS)


def kinds_in(process: str) -> frozenset[str]:
    """Names of the kinds whose hooks are called in a process: `client`, `gateway`, `executor` or `command`."""
    return frozenset(kind.name for kind in KINDS if process in kind.processes)


COMMAND_KINDS: Final = kinds_in("command")
CLIENT_KINDS: Final = kinds_in("client")
GATEWAY_KINDS: Final = kinds_in("gateway")
EXECUTOR_KINDS: Final = kinds_in("executor")
