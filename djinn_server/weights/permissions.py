"""Check paths and network addresses against the operator's permissions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from djinn_core.errors import WeightsUnavailable
from djinn_server.hookspecs.weight_sources import WeightPermissions


def allows(permissions: WeightPermissions, address: str) -> bool:
    """Return True if clients may read a network address."""
    return any(_matches(address, pattern) for pattern in permissions.addresses)


def resolve(permissions: WeightPermissions, path: Path) -> Path:
    """Return the path of a file or folder that clients may read, with symbolic links followed.

    Raises:
        WeightsUnavailable: the path is outside of the permitted folders, or does not exist. The message is the same in
            both cases, so that a client cannot learn what is on the disk.
    """
    try:
        resolved = path.resolve(strict=True)
        if _is_within(resolved, permissions.saving) or (
            _is_within(resolved, permissions.folders) and not _is_within(resolved, permissions.hidden)
        ):
            return resolved
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no file can have
        pass
    raise WeightsUnavailable(f"there is no {str(path)!r} in the folders that the server reads models from (--models)")


def resolve_new(permissions: WeightPermissions, path: Path) -> Path:
    """Return the path of a file that the tenant may write, with symbolic links followed. The file need not exist.

    Raises:
        WeightsUnavailable: the path is outside of the folders for saving.
    """
    try:
        resolved = path.parent.resolve() / path.name
        if path.name != ".." and _is_within(resolved, permissions.saving):
            return resolved
    except (OSError, RuntimeError, ValueError):
        pass
    raise WeightsUnavailable(f"{str(path)!r} is in no folder that clients may save weights in (--save-weights)")


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
    given_scheme, given_separator, address_path = address.partition("://")
    given_host = re.split("[/?#]", address_path, maxsplit=1)[0]  # `?` and `#` end a host, too
    given_slash, given_path = address_path[len(given_host) :][:1], address_path[len(given_host) + 1 :]
    if (
        not given_separator
        or not fnmatch.fnmatchcase(given_scheme, scheme)
        or not fnmatch.fnmatchcase(given_host, host)
    ):
        return False
    if not slash:  # `hf://*` is everything
        return host.endswith("*") or not given_slash
    return given_slash == "/" and fnmatch.fnmatchcase(given_path, path)
