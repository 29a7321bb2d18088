"""For devices that do something else than compute: every op that is called, before it runs, and what its schema says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import importing
from djinn_core.torch_private import schema_of

# Of the server, which a machine of a client need not have.
if TYPE_CHECKING:
    from djinn_server.compiling.torch_libraries import DispatchMode

__all__ = ["DispatchMode", "schema_of"]

_PLACES = {
    "djinn_server.compiling.torch_libraries": "DispatchMode",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)
