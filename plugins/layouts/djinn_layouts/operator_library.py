"""The plugin of clients and executors: the operator library `layouts`. An executor may lack `djinn_client`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from djinn.hooks import OperatorLibrary, hookimpl

djinn_api_version = "2.0"


class LayoutCalls(OperatorLibrary):
    """Run, on an executor, the ops that `Layouts` has recorded."""

    name = "layouts"
    module = "djinn_layouts.execution"
    operators = frozenset[str]()

    def implementation(self, op: str) -> Callable[..., Any] | None:
        """Return the function that runs `op` on the executor if `op` is `djinn::layout_call`, else None."""
        return _layout_call if op == "djinn::layout_call" else None


def _layout_call(name: Any, *args: Any, **kwargs: Any) -> Any:
    from djinn_layouts.execution import layout_call

    return layout_call(name, *args, **kwargs)


@hookimpl
def djinn_register_operators() -> list[OperatorLibrary]:
    """Return the operator library `layouts`. It needs no `--operators`, because it registers no custom op."""
    return [LayoutCalls()]
