"""Sparse, compressed, quantized and nested tensors on the remote device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from djinn.hooks import OperatorLibrary, OpHandler, hookimpl

djinn_api_version = "2.0"


class Layouts(OpHandler):
    """Handler of ops that create sparse, quantized or nested tensors. It is imported on first use."""

    name = "layouts"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and return its result as PyTorch does for remote tensors."""
        from djinn_layouts.dispatch import run

        return run(func, args, kwargs)


class LayoutCalls(OperatorLibrary):
    """Run, on an executor, the ops that `Layouts` has recorded."""

    name = "layouts"
    module = "djinn_layouts.execution"
    operators = frozenset[str]()

    def implementation(self, op: str) -> Callable[..., Any] | None:
        """Return the function that runs `op` on the executor, if `op` is `djinn::layout_call`."""
        return _layout_call if op == "djinn::layout_call" else None


def _layout_call(name: Any, *args: Any, **kwargs: Any) -> Any:
    from djinn_layouts.execution import layout_call

    return layout_call(name, *args, **kwargs)


@hookimpl
def djinn_register_op_handlers() -> list[OpHandler]:
    """Return the op handler `layouts`."""
    return [Layouts()]


@hookimpl
def djinn_register_operators() -> list[OperatorLibrary]:
    """Return the operator library `layouts`. It needs no `--operators`, because it registers no custom op."""
    return [LayoutCalls()]
