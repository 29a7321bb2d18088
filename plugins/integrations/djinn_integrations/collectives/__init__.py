"""Collectives of `torch.distributed` on remote tensors."""

from __future__ import annotations

from typing import Any

from djinn.hooks import OpHandler, hookimpl

djinn_api_version = "2.0"


class Collectives(OpHandler):
    """Op handler for collectives, whose values pass through the clients. The first collective imports the implementation."""

    name = "collectives"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective, as `OpHandler.run`."""
        from djinn_integrations.collectives.exchange import run

        return run(func, args, kwargs)


@hookimpl
def djinn_register_op_handlers() -> list[OpHandler]:
    """Return the op handler `collectives`."""
    return [Collectives()]
