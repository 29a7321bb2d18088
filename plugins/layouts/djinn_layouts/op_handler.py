"""The plugin of clients: the op handler `layouts`."""

from __future__ import annotations

from typing import Any

from djinn.hooks import OpHandler, hookimpl

djinn_api_version = "2.0"


class Layouts(OpHandler):
    """Handler of ops that create sparse, quantized or nested tensors. It imports `dispatch` on first use."""

    name = "layouts"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and return its result as PyTorch does for remote tensors."""
        from djinn_layouts.dispatch import run

        return run(func, args, kwargs)


@hookimpl
def djinn_register_op_handlers() -> list[OpHandler]:
    """Return the op handler `layouts`."""
    return [Layouts()]
