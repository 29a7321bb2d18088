"""Changes to modules when the user's program imports them. Uses wrapt's post-import hooks."""

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
    """Call each function in `wanted` with the module that its key names, at once or when that module is imported.

    An exception of a function is logged with `by`, the plugin's name. The import of the module continues.
    A reload (`importlib.reload`) does not call the function again.
    """
    for name, adapt in wanted.items():
        call_on_import(name, partial(_adapt, adapt, by))


def call_on_import(name: str, call: Adapt) -> None:
    """Call `call` with the module `name`, which another thread may be importing now.

    An exception of `call` aborts that import.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if getattr(spec, "_initializing", False):
        importlib.import_module(name)  # waits for the importing thread; wrapt would pass a half-imported module
    register_post_import_hook(call, name)


def _adapt(adapt: Adapt, by: str, module: ModuleType) -> None:
    try:
        adapt(module)
    except Exception as error:
        _log.warning(
            "a library could not be adapted to the device: pass the device to it explicitly",
            module=module.__name__,
            by=by,
            error=repr(error),
        )


def rebind(old: object, new: object, packages: Sequence[str]) -> None:
    """Replace `old` by `new` in all imported modules of `packages`, under every name that refers to `old`."""
    below = tuple(f"{package}." for package in packages)
    for path, module in list(sys.modules.items()):
        if path.startswith(below) or path in packages:
            for name in [name for name, member in vars(module).items() if member is old]:
                setattr(module, name, new)
