"""The kinds of plugin: one per hook, in pipeline order."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

import msgspec


class Kind(msgspec.Struct, frozen=True):
    """A kind of plugin, such as `patterns`.

    `specification` imports the hook's module lazily, because the `commands` hook must load without PyTorch.

    Attributes:
        name: plural name of the objects that its hook returns. It is also the name in `djinn plugins` and `Registry`,
            the end of the hook's name, and the name of the hook's module.
        base_name: name of the base class of the objects, in that module.
        processes: the processes in which its hook is called: `client`, `gateway`, `executor`, or `command`, the command
            `djinn`.
        package: the package that declares the hook. Clients may lack `djinn_server` with the kinds of servers. Servers
            may lack `djinn_client`.
    """

    name: str
    base_name: str
    processes: tuple[str, ...] = ("client",)
    package: str = "djinn_core"

    @property
    def hook(self) -> str:
        """Name of the hook."""
        return f"djinn_register_{self.name}"

    @property
    def specification(self) -> ModuleType:
        """The module that declares the hook."""
        return importlib.import_module(f"{self.package}.hookspecs.{self.name}")

    @property
    def base(self) -> type:
        """Base class of the kind's objects: a class of Djinn or of another library."""
        base: type = vars(self.specification)[self.base_name]
        return base


CLIENT: Final = "djinn_client"
SERVER: Final = "djinn_server"
INTEGRATIONS: Final = "integrations"
KINDS: Final[tuple[Kind, ...]] = (
    Kind(INTEGRATIONS, "Integration", package=CLIENT),
    Kind("interception", "Interception", package=CLIENT),
    Kind("op_handlers", "OpHandler", package=CLIENT),
    Kind("operators", "OperatorLibrary", ("client", "executor")),
    Kind("routers", "Router", package=CLIENT),
    Kind("patterns", "Pattern"),
    Kind("cost_models", "CostModel"),
    Kind("optimizations", "Optimization"),
    Kind("placement_policies", "PlacementPolicy"),
    Kind("schedulers", "Scheduler"),
    Kind("transports", "Transport", ("client", "gateway", "executor")),
    Kind("channels", "ChannelWrapper", package=CLIENT),
    Kind("executors", "ExecutorEngine", ("client", "gateway"), SERVER),
    Kind("devices", "Device", ("gateway", "executor"), SERVER),
    Kind("compilers", "Compiler", ("executor",), SERVER),
    Kind("run_strategies", "RunStrategy", ("executor",), SERVER),
    Kind("weight_sources", "WeightSource", ("executor",), SERVER),
    Kind("weight_formats", "WeightFormat", ("executor",), SERVER),
    Kind("authenticators", "Authenticator", ("gateway",), SERVER),
    Kind("assignment_policies", "AssignmentPolicy", ("gateway",), SERVER),
    Kind("operations", "OperationsServer", ("gateway",), SERVER),
    Kind("observers", "Observer", ("client", "gateway", "executor")),
    Kind("renderers", "Renderer", package=CLIENT),
    Kind("commands", "Command", ("command",)),
)

EVERY_KIND: Final = frozenset(kind.name for kind in KINDS)


def kinds_in(process: str) -> frozenset[str]:
    """Return the names of the kinds with hooks for a process: `client`, `gateway`, `executor` or `command`."""
    return frozenset(kind.name for kind in KINDS if process in kind.processes)


CLIENT_KINDS: Final = kinds_in("client")
GATEWAY_KINDS: Final = kinds_in("gateway")
EXECUTOR_KINDS: Final = kinds_in("executor")
