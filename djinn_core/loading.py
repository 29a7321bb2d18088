"""Imports without garbage collection: each would look at all that PyTorch has made, up to 0.15 s."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from djinn_core.interception.recording.gc_pause import collect_later
from djinn_core.role import is_client


def importing(place: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of module `place`, which imports what is asked for; `names`: by module of Djinn the names of it that it offers."""
    modules = {name: module for module, listed in names.items() for name in listed.split()}

    def find(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {place!r} has no attribute {name!r}")
        with collect_later:
            found = getattr(importlib.import_module(module), name)
        setattr(sys.modules[place], name, found)
        return found

    return find


def listing(place: str) -> Callable[[], list[str]]:
    """The `__dir__` of module `place`: what it has, and what it offers and has not imported yet."""
    return lambda: sorted({*vars(sys.modules[place]), *sys.modules[place].__all__})


def attach() -> None:
    """Register the device, where this process is a client."""
    if is_client():
        with collect_later:
            importlib.import_module("djinn_core.runtime.attaching").attach()
            importlib.import_module("djinn_core.runtime.server_files").save_at_addresses()
