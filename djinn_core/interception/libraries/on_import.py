"""Import hooks: changes to modules that are applied when the user's program imports them."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from djinn_core.logs import get_logger

Adapt = Callable[[Any], None]

_log = get_logger("djinn.interception")


class ImportWatch(MetaPathFinder):
    """Finds the modules that it waits for as Python would, and adapts them once they have run."""

    def __init__(self, wanted: dict[str, Adapt]) -> None:
        self.wanted = wanted

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that is waited for; None for all others."""
        if fullname not in self.wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_adapt(module: ModuleType) -> None:
                run(module)
                self.adapt(module)

            spec.loader.exec_module = run_and_adapt  # type: ignore[method-assign]
        return spec

    def adapt(self, module: ModuleType) -> None:
        """Adapt `module`; a version of it that lacks what is to be changed stays as it is."""
        try:
            self.wanted[module.__name__](module)
        except (AttributeError, ImportError) as error:
            _log.warning(
                "a library is not as expected, and was not told of the device: name the device yourself",
                module=module.__name__,
                error=repr(error),
            )


def adapt_on_import(wanted: dict[str, Adapt]) -> None:
    """Have each function called with its module: now where it is imported already, else when it is."""
    watch = ImportWatch(wanted)
    sys.meta_path.insert(0, watch)
    for name in wanted:
        if name in sys.modules:
            watch.adapt(sys.modules[name])


def rebind(old: object, new: object, packages: Sequence[str]) -> None:
    """Replace `old` by `new` in all modules of `packages` that are imported and hold it under any name."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] in packages:
            for name in [name for name, held in vars(module).items() if held is old]:
                setattr(module, name, new)
