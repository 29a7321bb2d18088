"""Weight sources that read buckets of object stores, by fsspec."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from djinn.errors import WeightsUnavailable
from djinn.hooks import WeightFile, WeightPermissions, WeightSource
from djinn_server.weights.permissions import allows
from djinn_weights.network_files.pieces import Pieces

_INDEX: Final = ".index.json"
_MOST_FILES: Final = 4096
_PATH: Final = re.compile(r"[^/@:?#\s]+(/[^/]+)*/?")  # a bucket and a key, without user or chained file systems
# Metadata that changes with an object's contents.
_VERSIONED: Final = ("ETag", "etag", "generation", "VersionId", "mtime", "LastModified", "updated", "created", "size")
_log = logging.getLogger("djinn_weights.network_files")


class BucketFile(WeightFile):
    """An object in a bucket, as a weight file."""

    def __init__(self, system: Any, found: Mapping[str, Any], pieces: Pieces) -> None:
        self._system = system
        self._path = str(found["name"])
        self._pieces = pieces
        self.name = self._path.rpartition("/")[2]
        self.size = int(found["size"])
        self._opened = _version(found)
        self._asked = False

    def version(self) -> str:
        """Return the current metadata of the object. It changes when the contents change."""
        if not self._asked:  # it was just opened
            self._asked = True
            return self._opened
        try:
            return _version(self._system.info(self._path))
        except FileNotFoundError:
            return "gone"
        except Exception as error:
            raise self._failure(error) from error

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the contents from byte `start` on."""
        if start + len(buffer) > self.size:
            raise OSError(f"{self.name!r} ends before byte {start + len(buffer)}")
        self._pieces.read(start, buffer, self._read)

    def _read(self, start: int, buffer: memoryview) -> None:
        if not buffer:
            return
        try:
            data = self._system.cat_file(self._path, start=start, end=start + len(buffer))
        except Exception as error:
            raise self._failure(error) from error
        if len(data) != len(buffer):
            raise OSError(f"{self.name!r} has been truncated")
        buffer[:] = data

    def _failure(self, error: Exception) -> OSError:
        """Return an error for clients that reveals no credentials of the server."""
        _log.warning("an object of a bucket cannot be read: %s", error)
        return OSError(f"the store did not return {self.name!r} ({type(error).__name__})")


class BucketSource(WeightSource):
    """Read `SCHEME://bucket/key` through fsspec, with the credentials of the server's user."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self._options = options
        self._made: Any = None
        self._lock = threading.Lock()
        self._pieces = Pieces()

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[str]:
        """Return candidate places of an address, in the order to try them."""
        del folders
        path = address.removeprefix(f"{self.name}://")
        if path == address or not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
            raise WeightsUnavailable(f"{address!r} is not a bucket address: write {self.name}://bucket/folder/file")
        return [address]

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """Open a network address. Return its weight files."""
        path = address.removeprefix(f"{self.name}://").rstrip("/")
        try:
            entry = self._found(path, permissions)
        except FileNotFoundError:
            raise WeightsUnavailable(f"there is no {address!r}") from None
        if not entry or len(entry) > _MOST_FILES:
            raise WeightsUnavailable(f"{address!r} has {len(entry) or 'no'} files with weights")
        return [BucketFile(self._system(), info, self._pieces) for info in entry]

    def _system(self) -> Any:
        with self._lock:
            if self._made is None:
                import fsspec  # imported late, because most servers read no bucket

                # Cached listings would grow, and hide new versions.
                self._made = fsspec.filesystem(
                    self.name, skip_instance_cache=True, use_listings_cache=False, **self._options
                )
            return self._made

    def _found(self, path: str, permissions: WeightPermissions) -> list[Mapping[str, Any]]:
        info = self._system().info(path)
        if info["type"] == "directory":
            return self._weights(path, permissions.suffixes)
        if not path.endswith(_INDEX):
            return [info]
        # The shards are files with the same suffix beside the index.
        folder, kind = path.rpartition("/")[0], path.removesuffix(_INDEX).rpartition(".")[2]
        shards = self._weights(folder, (f".{kind}",))
        return [info, *(shard for shard in shards if allows(permissions, f"{self.name}://{self._key(shard)}"))]

    def _weights(self, folder: str, suffixes: tuple[str, ...]) -> list[Mapping[str, Any]]:
        entries = self._system().ls(folder, detail=True)
        weight_files = (entry for entry in entries if entry["type"] == "file" and self._key(entry).endswith(suffixes))
        return sorted(weight_files, key=self._key)

    @staticmethod
    def _key(found: Mapping[str, Any]) -> str:
        return str(found["name"]).lstrip("/")


def _version(found: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={found[key]}" for key in _VERSIONED if found.get(key) is not None)
