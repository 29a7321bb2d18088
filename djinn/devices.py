"""For devices that do something else than compute: every op that is called, before it runs, and what its schema says."""

from __future__ import annotations

from djinn_core.torch_private import schema_of
from djinn_server.compiling.torch_libraries import DispatchMode

__all__ = ["DispatchMode", "schema_of"]
