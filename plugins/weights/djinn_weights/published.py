"""The weight source `published:`: files on the server's disk that a tenant publishes under names.

The files outlive programs, executors and the server. Each publication is a file `NAME@ID.safetensors` in the tenant's
folder. The ID begins with the times of creation and expiry, so a directory listing suffices to read them. The newest
file of a name is the current one.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import attrs

from djinn.errors import WeightsUnavailable
from djinn.hooks import WeightSource, hookimpl
from djinn_core.wire.weight_messages import PublishedEntry
from djinn_server.builtins.weights import LocalFile, LocalSink
from djinn_server.hookspecs.weight_sources import FileRoom, NamingSource

djinn_api_version = "2.0"

SCHEME: Final = "published"
MAX_NAMES: Final = 1000  # of a tenant
_SUFFIX: Final = ".safetensors"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE: Final = re.compile(rf"({_NAME.pattern})@([0-9a-f]{{1,16}})-([0-9a-f]{{1,16}})-[0-9a-f]{{16}}")


@attrs.frozen
class PublishSettings:
    """Settings of published weights, as in `[plugins.published]`.

    Attributes:
        hours: maximum lifetime of a published name. With 0, clients cannot publish.
    """

    hours: float = attrs.field(default=168.0, validator=attrs.validators.ge(0))


djinn_settings = PublishSettings


@attrs.frozen
class PublishedFile:
    """A published file. `created_ms`, `expires_ms`: times in milliseconds since 1970."""

    name: str
    path: Path
    created_ms: int
    expires_ms: int
    nbytes: int

    @property
    def address(self) -> str:
        """Address of this very file. Later files of the name have other addresses."""
        return f"{SCHEME}:{self.path.name.removesuffix(_SUFFIX)}"


class PublishedWeights(NamingSource):
    """Published weights of one tenant. Thread-safe. Processes that share the folder see each other's names."""

    name = SCHEME
    most_files = 2 * MAX_NAMES  # a replaced file is removed after its successor is complete

    def __init__(self, max_seconds: float) -> None:
        """`max_seconds`: maximum lifetime of a name in seconds."""
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._folder = Path()
        self._file_room: FileRoom

    def keep_in(self, folder: Path, room: FileRoom) -> None:
        """Store files in `folder`, within the limits of `room`. Remove expired files of all tenants."""
        self._folder, self._file_room = folder, room
        _remove_expired(folder.parent)

    def publish(self, address: str, size: int, seconds: float) -> LocalSink:
        """Create a file of `size` bytes for a name. Its `commit` removes older files of the name.

        `seconds`: lifetime. 0 selects the maximum.
        """
        name = address.removeprefix(f"{SCHEME}:")
        if _NAME.fullmatch(name) is None:
            raise WeightsUnavailable(
                f"{name!r} is not a valid name for published weights: use up to 100 ASCII letters, digits, '.', '_' and '-', and begin "
                "with a letter or a digit"
            )
        seconds = seconds or self._max_seconds
        if seconds > self._max_seconds:
            raise WeightsUnavailable(
                f"weights can be published for at most {self._max_seconds:,.0f} s, not for {seconds:,.0f} s"
            )
        with self._lock:
            names = {publication.name for publication in self._publications()}
            if name not in names and len(names) >= MAX_NAMES:
                raise WeightsUnavailable(
                    f"cannot publish {name!r}: the limit of {MAX_NAMES:,} names is reached; unpublish a name first"
                )
            self._file_room.check(size)
            # If the clock was set back, the new file must still be newer than existing files of the name.
            created_ms = max(
                [
                    _now_ms(),
                    *(publication.created_ms + 1 for publication in self._publications() if publication.name == name),
                ]
            )
            file_name = f"{name}@{created_ms:x}-{_now_ms() + int(seconds * 1000):x}-{secrets.token_hex(8)}{_SUFFIX}"
            try:
                return LocalSink(self._folder / file_name, size, lambda: self._remove_older(name, created_ms))
            except OSError as error:
                raise WeightsUnavailable(f"{name!r} cannot be published: {error.strerror or error}") from error

    def find(self, address: str) -> tuple[str, LocalFile]:
        """Open the current file of a name, or the file with the address `address`. Return its own address and the file."""
        requested_name = address.removeprefix(f"{SCHEME}:")
        publication = next((newest for newest in self._newest() if newest.name == requested_name), None)
        path = self._folder / f"{requested_name}{_SUFFIX}"
        try:
            if publication is not None:
                return publication.address, LocalFile(publication.path, publication.path.name, immutable=True)
            if _FILE.fullmatch(requested_name) and path.exists():
                return address, LocalFile(path, path.name, immutable=True)
        except OSError as error:
            raise WeightsUnavailable(f"{requested_name!r} cannot be opened: {error.strerror or error}") from error
        name = requested_name.partition("@")[0]
        raise WeightsUnavailable(
            f"nothing is published as {name!r}; see `djinn published`"
            if name == requested_name
            else f"the weights that were published as {name!r} have been replaced or removed, or have expired"
        )

    def listing(self) -> list[PublishedEntry]:
        """Return the current file of each name, sorted by name, and remove expired files."""
        now_ms = _now_ms()
        ages = [
            (
                publication,
                max(0, now_ms - publication.created_ms) / 1000,
                max(0, publication.expires_ms - now_ms) / 1000,
            )
            for publication in self._newest()
        ]
        return [
            PublishedEntry(publication.name, publication.nbytes, age, remaining) for publication, age, remaining in ages
        ]

    def _newest(self) -> list[PublishedFile]:
        with self._lock:
            newest: dict[str, PublishedFile] = {}
            for publication in self._publications():
                if publication.name not in newest or newest[publication.name].created_ms < publication.created_ms:
                    newest[publication.name] = publication
            return [newest[name] for name in sorted(newest)]

    def unpublish(self, address: str) -> None:
        """Remove the files of a published name. Sessions that have opened a file can still use its weights."""
        name = address.removeprefix(f"{SCHEME}:")
        publications = [publication for publication in self._newest() if publication.name == name]
        if not publications:
            raise WeightsUnavailable(f"nothing is published as {name!r}") from FileNotFoundError()
        try:
            self._remove_older(name, publications[0].created_ms + 1)
        except OSError as error:
            raise WeightsUnavailable(f"{name!r} cannot be removed: {error.strerror or error}") from error

    def _remove_older(self, name: str, created_ms: int) -> None:
        """Remove the files of a name that were created before `created_ms`."""
        with self._lock:
            for publication in self._publications():
                if publication.name == name and publication.created_ms < created_ms:
                    publication.path.unlink(missing_ok=True)
            self._file_room.count()

    def _publications(self) -> list[PublishedFile]:
        return [publication for path in self._folder.iterdir() if (publication := _unexpired(path)) is not None]


def _remove_expired(folders: Path) -> None:
    """Remove the expired files of all tenants. `folders`: the folder with a folder for each tenant."""
    for path in folders.glob(f"*/*{_SUFFIX}"):
        _unexpired(path)


def _unexpired(path: Path) -> PublishedFile | None:
    """Return the published file at a path, or None for another file. Remove an expired file, and return None."""
    publication = _parse_publication(path)
    if publication is None or publication.expires_ms > _now_ms():
        return publication
    path.unlink(missing_ok=True)
    return None


def _parse_publication(path: Path) -> PublishedFile | None:
    match = _FILE.fullmatch(path.name.removesuffix(_SUFFIX)) if path.name.endswith(_SUFFIX) else None
    if match is None:
        return None
    try:
        nbytes = path.lstat().st_size
    except FileNotFoundError:  # another process has removed it
        return None
    return PublishedFile(match[1], path, int(match[2], 16), int(match[3], 16), nbytes)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@hookimpl
def djinn_register_weight_sources(settings: Any) -> Iterable[WeightSource]:
    """Return the weight source `published:`, or an empty list if the setting `hours` is 0."""
    own_settings = settings if isinstance(settings, PublishSettings) else PublishSettings()
    return [PublishedWeights(own_settings.hours * 3600)] if own_settings.hours else []
