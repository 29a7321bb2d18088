"""Changes to modules when the user's program imports them, by wrapt's post-import hooks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from djinn_core.logs import get_logger

Adapt = Callable[[Any], None]

_log = get_logger("djinn.interception")


def adapt_on_import(wanted: Mapping[str, Adapt], by: str = "djinn") -> None:
    """Have each function called with its module: now where it is imported already, else when it is.

    What a function raises is logged, and ascribed to the plugin that `by` names; the module stays as it is, and its import
    goes on. A module that is imported again (`importlib.reload`) is not adapted again.
    """
    for name, adapt in wanted.items():
        call_on_import(name, partial(_adapt, adapt, by))


def call_on_import(name: str, call: Adapt) -> None:
    """Have `call` called with the module `name`, which another thread may be importing now. What it raises ends that import."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if getattr(spec, "_initializing", False):
        importlib.import_module(name)  # waits for that thread; wrapt would hand over half a module
    register_post_import_hook(call, name)


def _adapt(adapt: Adapt, by: str, module: ModuleType) -> None:
    try:
        adapt(module)
    except Exception as error:
        _log.warning(
            "a library is not as expected, and was not told of the device: name the device yourself",
            module=module.__name__,
            by=by,
            error=repr(error),
        )


def rebind(old: object, new: object, packages: Sequence[str]) -> None:
    """Replace `old` by `new` in all modules of `packages` that are imported and hold it under any name."""
    below = tuple(f"{package}." for package in packages)
    for path, module in list(sys.modules.items()):
        if path.startswith(below) or path in packages:
            for name in [name for name, held in vars(module).items() if held is old]:
                setattr(module, name, new)
