"""Lazy imports of public names, without garbage collection, which would scan all objects of PyTorch (up to 0.15 s)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from djinn_core.system.gc_pause import collect_later, count_as_old
from djinn_core.system.role import is_client

_CORE = ("djinn", "djinn_core", "djinn_client", "djinn_server")
PUBLIC = ("errors", "hooks", "planning", "weights", "profiler", "compat", "testing")


def lazy_names(public_module: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of the module `public_module`.

    `__getattr__` imports a name on access, and `__dir__` lists all names. A name can be imported even if its plugin package
    is missing. Its use then raises an error that names the package.

    Args:
        public_module: name of the module.
        names: for each name that `public_module` offers, the module that defines it.
    """
    modules = {name: module for module, name_list in names.items() for name in name_list.split()}

    def load(name: str) -> Any:
        module = modules.get(name)
        with collect_later:
            if module is not None:
                value = getattr(_imported(module, f"{public_module}.{name}"), name)
            elif public_module == "djinn" and name in PUBLIC:
                value = importlib.import_module(f"djinn.{name}")
            else:
                other_module = _other_module_with(name, public_module)
                hint = f": it is `{other_module}.{name}`" if other_module else ""
                raise AttributeError(f"module {public_module!r} has no attribute {name!r}{hint}", name=name)
        setattr(sys.modules[public_module], name, value)
        return value

    def find(name: str) -> Any:
        try:
            return load(name)
        except ModuleNotFoundError as error:
            package = error.name or ""
            if not package.startswith("djinn_") or package in _CORE:
                raise
            return _stand_in(name, public_module, package, load)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[public_module]), *sys.modules[public_module].__all__})

    return find, list_names


def _other_module_with(name: str, public_module: str) -> str:
    """Return another public module that has a name, or an empty string."""
    if name.startswith("_") or name in PUBLIC:
        return ""
    for module in PUBLIC:
        other_module = f"djinn.{module}"
        if other_module != public_module and name in getattr(importlib.import_module(other_module), "__all__", ()):
            return other_module
    return ""


def _imported(module: str, full_name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "djinn_client":
            raise ModuleNotFoundError(
                f"`{full_name}` needs the client, a part of djinn that is missing here", name=error.name
            ) from None
        if error.name != "djinn_server":
            raise
        from djinn_core.registry.embedded_executors import INSTALL_SERVER

        raise ModuleNotFoundError(
            f"`{full_name}` needs the package djinn-server, which is not installed. {INSTALL_SERVER}", name=error.name
        ) from None


def _stand_in(name: str, public_module: str, package: str, load: Callable[[str], Any]) -> Any:
    """Return a stub for a function or class whose package is missing.

    If the package is still missing when the stub is used, the stub raises an error that names the package.
    """

    def use(*args: Any, **kwargs: Any) -> Any:
        try:
            value = load(name)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise _missing(f"{public_module}.{name}", package) from None
        return value(*args, **kwargs)

    return type(name, (), {"__new__": lambda _, *args, **kwargs: use(*args, **kwargs)}) if name[0].isupper() else use


def _missing(full_name: str, package: str) -> Exception:
    from djinn_core.errors import PluginError, install_hint

    hint, distribution = install_hint(f"plugins/{package.removeprefix('djinn_')}"), package.replace("_", "-")
    return PluginError(f"`{full_name}` is in the package {distribution}, which is not installed: run {hint}")


def attach() -> None:
    """Register the device if the client's package is installed. Servers and planners may lack it."""
    if is_client() and find_spec("djinn_client") is not None:
        with collect_later:
            importlib.import_module("djinn_client.runtime.early_start").begin()
            importlib.import_module("djinn_client.runtime.attaching").attach()
            if find_spec("djinn_integrations") is not None:
                importlib.import_module("djinn_integrations.weights.server_files").save_at_addresses()
            count_as_old()
