"""Ops that the executor cannot run, computed on the client if the setting `client_fallback` is on."""

from __future__ import annotations

from djinn.hooks import OpHandler, hookimpl

djinn_api_version = "2.0"


@hookimpl
def djinn_register_op_handlers() -> list[OpHandler]:
    """Return the op handler `fallback`."""
    from djinn_integrations.client_fallback.compute import ClientFallback

    return [ClientFallback()]
