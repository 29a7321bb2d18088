"""`djinn_register_api_names`: names of the module `djinn` that packages bring."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec


@attrs.frozen
class ApiName:
    """A function or class that programs find in the module `djinn`.

    Attributes:
        name: its name there, and in its module.
        module: full name of the module that defines it, which is imported when a program asks for the name.
    """

    name: str
    module: str

    def load(self) -> Any:
        """Import the function or class, and return it."""
        return getattr(importlib.import_module(self.module), self.name)


@hookspec
def djinn_register_api_names(settings: Any) -> Iterable[ApiName]:
    """Return the names that this plugin adds to the module `djinn`.

    Called once in each client process that asks `djinn` for a name which is not its own, of the plugins that have an entry point in the
    group `djinn.api`, and when the plugins are first needed. A name that Djinn has itself is never asked for; of two plugins with
    one name the second is refused. An exception disables the plugin. Since API version 1.
    """
    del settings
    raise NotImplementedError
