"""Op handlers: run ops that the device cannot record as one instruction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from djinn_client.sink import OpHandler
from djinn_core.hookspecs import hookspec


@hookspec
def djinn_register_op_handlers(settings: Any) -> Iterable[OpHandler]:
    """Return the op handlers that this plugin offers.

    Called once in the client process, when the device first needs an op handler. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
