"""Integrations: adapt modules of a library to the device when a program imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec


@attrs.frozen
class Integration:
    """Adapt one module of a library to the remote device, in the client process.

    Attributes:
        name: unique among integrations.
        module: full name of the module, such as `transformers.trainer`.
        adapt: changes the module. Called once in a process, on the thread that imports the module, after the module has
            run and before its importer continues. If the module is already imported, `adapt` is called at once. If
            `adapt` raises, the import continues, and the log names the plugin. The change stays until the process ends.
            A function that must stop when the user disables the plugin calls `djinn.hooks.is_disabled`.
    """

    name: str
    module: str
    adapt: Callable[[ModuleType], None]


@hookspec
def djinn_register_integrations(settings: Any) -> Iterable[Integration]:
    """Return the integrations that this plugin offers.

    Called once in the client process. An entry point in the group `djinn.integrations` names a library. The hook is
    then called when the program imports that library or first plans a program, whichever is earlier. Without such an
    entry point, it is called when the session begins. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
