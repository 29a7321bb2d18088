"""Sparse, compressed, quantized and nested tensors on the remote device."""

from __future__ import annotations

from typing import Any

from djinn.hooks import OpHandler, hookimpl

djinn_api_version = "2.0"


class Layouts(OpHandler):
    """Makes such tensors; ops on one reach its class. What runs them is imported with the first."""

    name = "layouts"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `OpHandler.run`."""
        from djinn_layouts.dispatch import run

        return run(func, args, kwargs)


@hookimpl
def djinn_register_op_handlers() -> list[OpHandler]:
    """The op handler `layouts`."""
    return [Layouts()]
