"""Open addresses of clients: ask the source for the places of an address, and check the operator's permissions.

A place is a local path (`LocalPlace`) or a network address.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from djinn_core.errors import WeightsUnavailable
from djinn_server.builtins.weights import open_folder
from djinn_server.hookspecs.weight_sources import (
    LocalPlace,
    ReportDownload,
    WeightFile,
    WeightPermissions,
    WeightSource,
)
from djinn_server.weights.permissions import allows, resolve, resolve_new


def ignore_progress(bytes_done: int, bytes_expected: int) -> None:
    """Ignore the progress of a download. It is a `ReportDownload`."""


def open_permitted(
    source: WeightSource, address: str, permissions: WeightPermissions, report: ReportDownload | None = ignore_progress
) -> Sequence[WeightFile]:
    """Return the weight files of an address, from its first permitted place (local path or URL) that has some.

    `report`: receives the progress of a download; None: only local places are opened.

    Raises:
        WeightsUnavailable: no permitted place has weights. The message does not reveal whether a forbidden place exists.
    """
    failure: WeightsUnavailable | None = None
    for place in _places(source, address, (*permissions.folders, *permissions.saving)):
        if not _is_permitted(place, permissions) or (report is None and not isinstance(place, LocalPlace)):
            continue
        try:
            if isinstance(place, LocalPlace):
                return open_folder(place.path, permissions, place.immutable)
            assert report is not None
            return _checked(source, source.download(place, permissions, report), WeightFile)
        except WeightsUnavailable as error:
            failure = failure or error
    raise failure or WeightsUnavailable(
        f"there is no {address!r} among the weights that clients may read (--models, --allow-weights)"
    )


def _is_permitted(place: LocalPlace | str, permissions: WeightPermissions) -> bool:
    if not isinstance(place, LocalPlace):
        return allows(permissions, place)
    try:
        resolve(permissions, place.path)
    except WeightsUnavailable:
        return False
    return True


def _places(source: WeightSource, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace | str]:
    return _checked(source, source.places(address, folders), LocalPlace | str)


def _checked(source: WeightSource, result: object, kind: type | UnionType) -> Sequence[Any]:
    """Return a plugin's result after a check that it is a sequence of `kind`.

    Raises:
        TypeError: the result has another type.
    """
    if (
        isinstance(result, str)
        or not isinstance(result, Sequence)
        or not all(isinstance(item, kind) for item in result)
    ):
        raise TypeError(f"the weight source {source.name!r} returned {type(result).__name__}, not a sequence of {kind}")
    return result


def writable_path(source: WeightSource, address: str, permissions: WeightPermissions) -> Path:
    """Return the path of an address if the tenant may write it.

    Raises:
        WeightsUnavailable: the tenant may not write the path.
    """
    for place in _places(source, address, permissions.saving[:1]):
        if isinstance(place, LocalPlace):
            return resolve_new(permissions, place.path)
    raise WeightsUnavailable(f"cannot save at {address!r}, because it is no path on the server's disk")
