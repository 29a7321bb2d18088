"""The weight source `published:`: files on the server's disk that a tenant publishes under names.

They outlive programs, executors and the server. Each publication is a file `NAME@ID.safetensors` in the tenant's folder.
The ID begins with the times of creation and expiry, so that a directory listing suffices. The newest file of a name is
current.
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
MOST_NAMES: Final = 1000  # of a tenant
_SUFFIX: Final = ".safetensors"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE: Final = re.compile(rf"({_NAME.pattern})@([0-9a-f]{{1,16}})-([0-9a-f]{{1,16}})-[0-9a-f]{{16}}")


@attrs.frozen
class PublishSettings:
    """Settings of published weights, as in `[plugins.published]`.

    Attributes:
        hours: maximum lifetime of a published name; 0: clients cannot publish.
    """

    hours: float = attrs.field(default=168.0, validator=attrs.validators.ge(0))


djinn_settings = PublishSettings


@attrs.frozen
class PublishedFile:
    """A published file. `made`, `expires`: times in milliseconds since 1970."""

    name: str
    path: Path
    made: int
    expires: int
    nbytes: int

    @property
    def address(self) -> str:
        """Address of this file. It does not lead to later files with the same name."""
        return f"{SCHEME}:{self.path.name.removesuffix(_SUFFIX)}"


class PublishedWeights(NamingSource):
    """Published weights of one tenant. Thread-safe. Processes that share the folder see each other's names."""

    name = SCHEME
    most_files = 2 * MOST_NAMES  # a replaced file goes once the next one is complete

    def __init__(self, longest: float) -> None:
        """`longest`: maximum lifetime of a name in seconds."""
        self._longest = longest
        self._lock = threading.Lock()
        self._folder = Path()
        self._room: FileRoom

    def keep_in(self, folder: Path, room: FileRoom) -> None:
        """Store files in a folder. Remove expired files of all tenants."""
        self._folder, self._room = folder, room
        _remove_expired(folder.parent)

    def publish(self, address: str, size: int, seconds: float) -> LocalSink:
        """Create a file of `size` bytes under a name. Its `commit` removes older files of the name.

        `seconds`: lifetime; 0: the maximum.
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
            names = {publication.name for publication in self._publications()}
            if name not in names and len(names) >= MOST_NAMES:
                raise WeightsUnavailable(f"cannot publish: {len(names):,} names are the limit; remove names first")
            self._room.check(size)
            # A clock that was set back must not make this one older than those before.
            created = max(
                [_now(), *(publication.made + 1 for publication in self._publications() if publication.name == name)]
            )
            file = f"{name}@{created:x}-{_now() + int(seconds * 1000):x}-{secrets.token_hex(8)}{_SUFFIX}"
            try:
                return LocalSink(self._folder / file, size, lambda: self._remove_older(name, created))
            except OSError as error:
                raise WeightsUnavailable(f"{name!r} cannot be published: {error.strerror or error}") from error

    def find(self, address: str) -> tuple[str, LocalFile]:
        """Open the file of a published name or of a published file's address. Return the file's address and the file."""
        wanted_name = address.removeprefix(f"{SCHEME}:")
        publication = next((newest for newest in self._newest() if newest.name == wanted_name), None)
        path = self._folder / f"{wanted_name}{_SUFFIX}"
        try:
            if publication is not None:
                return publication.address, LocalFile(publication.path, publication.path.name, immutable=True)
            if _FILE.fullmatch(wanted_name) and path.exists():
                return address, LocalFile(path, path.name, immutable=True)
        except OSError as error:
            raise WeightsUnavailable(f"{wanted_name!r} cannot be opened: {error.strerror or error}") from error
        name = wanted_name.partition("@")[0]
        raise WeightsUnavailable(
            f"nothing is published as {name!r}"
            if name == wanted_name
            else f"the weights that were published as {name!r} have been replaced or removed, or have expired"
        )

    def listing(self) -> list[PublishedEntry]:
        """Return the current files by name, and remove expired ones."""
        now = _now()
        ages = [
            (publication, max(0, now - publication.made) / 1000, max(0, publication.expires - now) / 1000)
            for publication in self._newest()
        ]
        return [
            PublishedEntry(publication.name, publication.nbytes, age, remaining) for publication, age, remaining in ages
        ]

    def _newest(self) -> list[PublishedFile]:
        with self._lock:
            newest: dict[str, PublishedFile] = {}
            for publication in self._publications():
                if publication.name not in newest or newest[publication.name].made < publication.made:
                    newest[publication.name] = publication
            return [newest[name] for name in sorted(newest)]

    def unpublish(self, address: str) -> None:
        """Remove a published name. Sessions that have opened it can still use the weights."""
        name = address.removeprefix(f"{SCHEME}:")
        publications = [publication for publication in self._newest() if publication.name == name]
        if not publications:
            raise WeightsUnavailable(f"nothing is published as {name!r}") from FileNotFoundError()
        try:
            self._remove_older(name, publications[0].made + 1)
        except OSError as error:
            raise WeightsUnavailable(f"{name!r} cannot be removed: {error.strerror or error}") from error

    def _remove_older(self, name: str, made: int) -> None:
        """Remove the files of a name that were published before `made`."""
        with self._lock:
            for publication in self._publications():
                if publication.name == name and publication.made < made:
                    publication.path.unlink(missing_ok=True)
            self._room.count()

    def _publications(self) -> list[PublishedFile]:
        return [publication for path in self._folder.iterdir() if (publication := _living(path)) is not None]


def _remove_expired(folders: Path) -> None:
    """Remove the expired files of all tenants, because most tenants have no executor now."""
    for path in folders.glob(f"*/*{_SUFFIX}"):
        _living(path)


def _living(path: Path) -> PublishedFile | None:
    """Return the published file at a path. Return None for other files; remove an expired file."""
    publication = _publication(path)
    if publication is None or publication.expires > _now():
        return publication
    path.unlink(missing_ok=True)
    return None


def _publication(path: Path) -> PublishedFile | None:
    match = _FILE.fullmatch(path.name.removesuffix(_SUFFIX)) if path.name.endswith(_SUFFIX) else None
    if match is None:
        return None
    try:
        nbytes = path.lstat().st_size
    except FileNotFoundError:  # another process has removed it
        return None
    return PublishedFile(match[1], path, int(match[2], 16), int(match[3], 16), nbytes)


def _now() -> int:
    return time.time_ns() // 1_000_000


@hookimpl
def djinn_register_weight_sources(settings: Any) -> Iterable[WeightSource]:
    """Return the weight source `published:`, unless clients cannot publish."""
    own_settings = settings if isinstance(settings, PublishSettings) else PublishSettings()
    return [PublishedWeights(own_settings.hours * 3600)] if own_settings.hours else []
