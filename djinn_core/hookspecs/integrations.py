"""Integrations: what the modules of a library are told of the device when a program imports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from djinn_core.hookspecs import hookspec


@runtime_checkable
class Integration(Protocol):
    """Changes one module of a library so that it knows the remote device. `name` is unique among integrations.

    Attributes:
        module: full name of the module that is waited for, such as `transformers.trainer`.
        only_under_run: True if it is wanted in processes of `djinn run` alone.
    """

    name: str
    module: str
    only_under_run: bool

    def adapt(self, module: Any) -> None:
        """Change `module`, which has just run: when the program imports it, or at once where it is imported already.

        Called once in a process, on the thread that imports the module, before that goes on.
        """


@hookspec
def djinn_register_integrations(settings: Any) -> Iterable[Integration]:
    """Return the integrations that this plugin offers.

    Called once in the client process: when the program imports a library that an entry point of the group
    `djinn.integrations` names with this plugin, or when a program is first planned, whichever is earlier; without such an
    entry point, when the session begins. An exception disables the plugin. One in `adapt` is logged with the plugin's name, and the import goes on; where the integration is
    `only_under_run` and its module is imported already, `djinn run` ends with it. Since API version 1.
    """
    del settings
    raise NotImplementedError
