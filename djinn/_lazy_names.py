"""Imports without garbage collection: each would look at all that PyTorch has made, up to 0.15 s."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from djinn_core.system.gc_pause import collect_later, count_as_old
from djinn_core.system.role import is_client

# In this order a name is looked for that a module does not have.
PUBLIC = ("errors", "hooks", "planning", "weights", "compat", "testing")

_NO_PACKAGES: Mapping[str, str] = MappingProxyType({})


def importing(place: str, names: Mapping[str, str], packages: Mapping[str, str] = _NO_PACKAGES) -> Callable[[str], Any]:
    """The `__getattr__` of module `place`, which imports what is asked for.

    Args:
        place: the module.
        names: by module of Djinn the names of it that it offers.
        packages: by folder of Djinn's repository the names that the package there brings; where there are any, other packages may
            bring others.
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}
    folders = {name: folder for folder, listed in packages.items() for name in listed.split()}

    def find(name: str) -> Any:
        module = modules.get(name)
        with collect_later:
            if module is not None:
                found = getattr(_imported(module, f"{place}.{name}"), name)
            elif place == "djinn" and name in PUBLIC:
                found = importlib.import_module(f"djinn.{name}")
            else:
                found = _of_package(name) if folders and not name.startswith("_") else None
        if found is not None:
            setattr(sys.modules[place], name, found)
            return found
        if name in folders:
            return _missing(name, folders[name])
        if other := _elsewhere(name, place):
            return getattr(importlib.import_module(other), name)
        raise AttributeError(f"module {place!r} has no attribute {name!r}", name=name)

    return find


def _elsewhere(name: str, place: str) -> str:
    """The public module that offers a name which `place` does not have; empty where there is none."""
    if name.startswith("_") or name in PUBLIC:
        return ""
    for module in PUBLIC:
        other = f"djinn.{module}"
        if other != place and name in getattr(importlib.import_module(other), "__all__", ()):
            return other
    return ""


def _imported(module: str, wanted: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "djinn_client":
            raise ModuleNotFoundError(
                f"`{wanted}` needs the client, a part of djinn that is missing here", name=error.name
            ) from None
        if error.name != "djinn_server":
            raise
        from djinn_core.registry.embedded_executors import INSTALL_SERVER

        raise ModuleNotFoundError(
            f"`{wanted}` needs the package djinn-server, which is not installed. {INSTALL_SERVER}", name=error.name
        ) from None


def _of_package(name: str) -> Any | None:
    from djinn_core.registry.api_names import find_api_name

    return find_api_name(name)


def _missing(name: str, folder: str) -> Callable[..., NoReturn] | type:
    """A function or class in place of a name whose package is not in use: it can be imported and asked for, and its use says what to install."""

    def missing(*_: Any, **__: Any) -> NoReturn:
        from djinn_core.registry.api_names import absent

        raise absent(name, folder)

    return type(name, (), {"__new__": missing}) if name[0].isupper() else missing


def listing(place: str) -> Callable[[], list[str]]:
    """The `__dir__` of module `place`: what it has, and what it offers and has not imported yet."""
    return lambda: sorted({*vars(sys.modules[place]), *sys.modules[place].__all__})


def attach() -> None:
    """Register the device if this process is a client. A server or a planner need not have the client's package."""
    if is_client() and find_spec("djinn_client") is not None:
        with collect_later:
            early = importlib.import_module("djinn_client.runtime.early_start").begin()
            importlib.import_module("djinn_client.runtime.attaching").attach(early)
            importlib.import_module("djinn_client.runtime.server_files").save_at_addresses()
            count_as_old()
