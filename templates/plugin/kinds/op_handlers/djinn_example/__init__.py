"""Op handler for Djinn that runs ops on the CPU."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_map

from djinn.hooks import OpHandler, hookimpl

djinn_api_version = "2.0"


class ExampleOpHandler(OpHandler):
    """Name it `layouts`, `collectives` or `fallback`, and the device calls it."""

    name = "example"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fetch the tensors and run the op on the client. Its results stay on the client."""
        here, named = tree_map(lambda one: one.cpu() if hasattr(one, "cpu") else one, (args, kwargs))
        return func(*here, **named)


@hookimpl
def djinn_register_op_handlers() -> list[OpHandler]:
    """Return the op handlers of this plugin."""
    return [ExampleOpHandler()]
