"""Weights that a tenant has published under names: files on the server's disk, which outlive programs, executors and the server.

Each publication is a file `NAME@ID.safetensors` in the tenant's folder. Its ID begins with its times of creation and
expiry, so a directory listing suffices. The newest file of a name is current.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from pathlib import Path
from typing import Final

import attrs

from djinn_core.errors import WeightsUnavailable
from djinn_server.builtins.weights import LocalFile, LocalSink
from djinn_server.disk_quota import DiskQuota
from djinn_server.weights.saving import SavedBytes

SCHEME: Final = "published"
MOST_NAMES: Final = 1000  # of a tenant
_SUFFIX: Final = ".safetensors"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE: Final = re.compile(rf"({_NAME.pattern})@([0-9a-f]{{1,16}})-([0-9a-f]{{1,16}})-[0-9a-f]{{16}}")


@attrs.frozen
class PublishedFile:
    """A published file.

    Attributes:
        name: its name.
        path: where it is.
        made, expires: milliseconds since the epoch.
        nbytes: bytes of the file.
    """

    name: str
    path: Path
    made: int
    expires: int
    nbytes: int

    @property
    def address(self) -> str:
        """Address of this file, not of later files with its name."""
        return f"{SCHEME}:{self.path.name.removesuffix(_SUFFIX)}"


class PublishedWeights:
    """The published weights of one tenant. Thread-safe; processes that share the folder see each other's names."""

    def __init__(self, folders: Path, longest: float, disk: DiskQuota, tenant: str) -> None:
        """Open a tenant's published weights.

        Args:
            folders: parent of the tenants' folders.
            longest: maximum lifetime of a name in seconds.
            disk: the tenant's disk quota.
            tenant: its name; empty without tenants.

        Raises:
            OSError: the tenant's folder cannot be made.
        """
        self._folder = folders / (tenant or "default")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._longest = longest
        self._room = SavedBytes(disk, self._folder, "published", 2 * MOST_NAMES)
        self._lock = threading.Lock()
        _remove_expired(folders)

    def create(self, address: str, size: int, seconds: float) -> LocalSink:
        """Create a file of `size` bytes with a lifetime in `seconds` (0: the maximum). Its `commit` removes older files of the name.

        Raises:
            WeightsUnavailable: the name or the lifetime is invalid, or the tenant's quota is reached.
        """
        name = address.removeprefix(f"{SCHEME}:")
        if _NAME.fullmatch(name) is None:
            raise WeightsUnavailable(
                f"{name!r} is not a valid name for published weights: up to 100 letters of ASCII, digits, '.', '_' and '-', and the first "
                "is a letter or a digit"
            )
        seconds = seconds or self._longest
        if seconds > self._longest:
            raise WeightsUnavailable(
                f"weights may be published for {self._longest:,.0f} s at the most, not for {seconds:,.0f} s"
            )
        with self._lock:
            there = {one.name for one in self._publications()}
            if name not in there and len(there) >= MOST_NAMES:
                raise WeightsUnavailable(f"cannot publish: {len(there):,} names are the limit; remove names first")
            self._room.check(size)
            # A clock that was set back must not make this one older than those before.
            made = max([_now(), *(one.made + 1 for one in self._publications() if one.name == name)])
            file = f"{name}@{made:x}-{_now() + int(seconds * 1000):x}-{secrets.token_hex(8)}{_SUFFIX}"
            try:
                return LocalSink(self._folder / file, size, lambda: self._remove_older(name, made))
            except OSError as error:
                raise WeightsUnavailable(f"{name!r} cannot be published: {error.strerror or error}") from error

    def open(self, address: str) -> tuple[str, LocalFile]:
        """Open a name, or the address of one of its files. Return the file's address, and the file.

        Raises:
            WeightsUnavailable: the name or file does not exist, or has expired.
        """
        asked = address.removeprefix(f"{SCHEME}:")
        found = next((one for one in self.listing() if one.name == asked), None)
        path = self._folder / f"{asked}{_SUFFIX}"
        try:
            if found is not None:
                return found.address, LocalFile(found.path, found.path.name, immutable=True)
            if _FILE.fullmatch(asked) and path.exists():
                return address, LocalFile(path, path.name, immutable=True)
        except OSError as error:
            raise WeightsUnavailable(f"{asked!r} cannot be opened: {error.strerror or error}") from error
        name = asked.partition("@")[0]
        raise WeightsUnavailable(
            f"nothing is published as {name!r}"
            if name == asked
            else f"what was published as {name!r} when it was attached has been replaced or removed, or has expired"
        )

    def listing(self) -> list[PublishedFile]:
        """Return the current publications by name, and remove expired ones."""
        with self._lock:
            newest: dict[str, PublishedFile] = {}
            for one in self._publications():
                if one.name not in newest or newest[one.name].made < one.made:
                    newest[one.name] = one
            return [newest[name] for name in sorted(newest)]

    def remove(self, address: str) -> None:
        """Remove a name. Sessions that have opened it keep its weights.

        Raises:
            WeightsUnavailable: the name is not published, or its files cannot be removed.
        """
        name = address.removeprefix(f"{SCHEME}:")
        found = [one for one in self.listing() if one.name == name]
        if not found:
            raise WeightsUnavailable(f"nothing is published as {name!r}") from FileNotFoundError()
        try:
            self._remove_older(name, found[0].made + 1)
        except OSError as error:
            raise WeightsUnavailable(f"{name!r} cannot be removed: {error.strerror or error}") from error

    def _remove_older(self, name: str, made: int) -> None:
        """Remove the files of a name that were published before `made`."""
        with self._lock:
            for one in self._publications():
                if one.name == name and one.made < made:
                    one.path.unlink(missing_ok=True)
            self._room.count()

    def _publications(self) -> list[PublishedFile]:
        return [one for path in self._folder.iterdir() if (one := _living(path)) is not None]


def _remove_expired(folders: Path) -> None:
    """Remove the expired files of all tenants: most tenants have no executor now."""
    for path in folders.glob(f"*/*{_SUFFIX}"):
        _living(path)


def _living(path: Path) -> PublishedFile | None:
    """Return the publication at a path; None for other files. Remove an expired one, and return None."""
    one = _publication(path)
    if one is None or one.expires > _now():
        return one
    path.unlink(missing_ok=True)
    return None


def _publication(path: Path) -> PublishedFile | None:
    found = _FILE.fullmatch(path.name.removesuffix(_SUFFIX)) if path.name.endswith(_SUFFIX) else None
    if found is None:
        return None
    try:
        nbytes = path.lstat().st_size
    except FileNotFoundError:  # another process has removed it
        return None
    return PublishedFile(found[1], path, int(found[2], 16), int(found[3], 16), nbytes)


def _now() -> int:
    return time.time_ns() // 1_000_000
