"""Sparse, compressed, quantized and nested tensors on the remote device."""

from __future__ import annotations

from typing import Any

from djinn.hooks import OpHandler, hookimpl

djinn_api_version = "2.0"


class Layouts(OpHandler):
    """Create tensors with other layouts. Later ops on them reach their class. The implementation is imported on first use."""

    name = "layouts"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `OpHandler.run`."""
        from djinn_layouts.dispatch import run

        return run(func, args, kwargs)


@hookimpl
def djinn_register_op_handlers() -> list[OpHandler]:
    """Return the op handler `layouts`."""
    return [Layouts()]
