"""Check paths and network addresses against the operator's permissions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from djinn_core.errors import WeightsUnavailable
from djinn_server.hookspecs.weight_sources import WeightPermissions


def allows(permissions: WeightPermissions, address: str) -> bool:
    """Return True if clients may read a network address: it matches a pattern of `--allow-weights`."""
    return any(_matches(address, pattern) for pattern in permissions.addresses)


def resolve(permissions: WeightPermissions, path: Path) -> Path:
    """Return the path of a file or folder that clients may read, with symbolic links followed.

    Raises:
        WeightsUnavailable: the path is outside of the permitted folders, or does not exist. The message is the same in
            both cases, so that a client cannot learn what is on the disk.
    """
    try:
        target = path.resolve(strict=True)
        if _is_within(target, permissions.saving) or (
            _is_within(target, permissions.folders) and not _is_within(target, permissions.hidden)
        ):
            return target
    except (OSError, RuntimeError, ValueError):  # for example a loop of links, or an invalid name
        pass
    raise WeightsUnavailable(
        f"there is no {str(path)!r} in the folders from which clients may read weights (`djinn serve --models`)"
    )


def resolve_new(permissions: WeightPermissions, path: Path) -> Path:
    """Return the path of a file that the tenant may write, with symbolic links followed. The file need not exist.

    Raises:
        WeightsUnavailable: the path is outside of the folders for saving.
    """
    try:
        target = path.parent.resolve() / path.name
        if path.name != ".." and _is_within(target, permissions.saving):
            return target
    except (OSError, RuntimeError, ValueError):
        pass
    raise WeightsUnavailable(
        f"{str(path)!r} is not in the folder in which this tenant may save weights (`djinn serve --save-weights`)"
    )


def _is_within(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder.resolve()) for folder in folders)


def _matches(address: str, pattern: str) -> bool:
    """Return True if an address matches a pattern. The host is compared with the host of the pattern.

    So `https://*.example.org/*` does not match `https://other/x.example.org/y`.
    """
    scheme, separator, pattern_path = pattern.partition("://")
    if not separator:
        return fnmatch.fnmatchcase(address, pattern)
    host, slash, path = pattern_path.partition("/")
    address_scheme, address_separator, address_path = address.partition("://")
    address_host = re.split("[/?#]", address_path, maxsplit=1)[0]  # `?` and `#` end a host, too
    address_slash, address_rest = address_path[len(address_host) :][:1], address_path[len(address_host) + 1 :]
    if (
        not address_separator
        or not fnmatch.fnmatchcase(address_scheme, scheme)
        or not fnmatch.fnmatchcase(address_host, host)
    ):
        return False
    if not slash:  # a pattern such as `hf://*` matches all paths
        return host.endswith("*") or not address_slash
    return address_slash == "/" and fnmatch.fnmatchcase(address_rest, path)
