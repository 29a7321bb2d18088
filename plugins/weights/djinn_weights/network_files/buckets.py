"""Weight sources that read buckets of object stores through fsspec."""

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
_MAX_FILES: Final = 4096
_PATH: Final = re.compile(r"[^/@:?#\s]+(/[^/]+)*/?")  # a bucket and a key, without user or chained file systems
# Keys of the metadata that change with an object's contents.
_VERSION_KEYS: Final = (
    "ETag",
    "etag",
    "generation",
    "VersionId",
    "mtime",
    "LastModified",
    "updated",
    "created",
    "size",
)
_log = logging.getLogger("djinn_weights.network_files")


class BucketFile(WeightFile):
    """An object in a bucket, as a weight file."""

    def __init__(self, system: Any, info: Mapping[str, Any], pieces: Pieces) -> None:
        self._system = system
        self._path = str(info["name"])
        self._pieces = pieces
        self.name = self._path.rpartition("/")[2]
        self.size = int(info["size"])
        self._first_version = _version(info)
        self._was_version_read = False

    def version(self) -> str:
        """Return the object's metadata as text, which changes when the contents change.

        The first call returns the metadata from when the object was opened, without a request.
        """
        if not self._was_version_read:  # it was just opened
            self._was_version_read = True
            return self._first_version
        try:
            return _version(self._system.info(self._path))
        except FileNotFoundError:
            return "gone"
        except Exception as error:
            raise self._failure(error) from error

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the contents from byte `start` on."""
        if start + len(buffer) > self.size:
            raise OSError(f"{self.name!r} ends before byte {start + len(buffer)}")
        self._pieces.read(start, buffer, self._read_range)

    def _read_range(self, start: int, buffer: memoryview) -> None:
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
        """Log `error`, and return an error for clients that reveals no credentials of the server."""
        _log.warning("cannot read the object %s of a bucket: %s", self._path, error)
        return OSError(f"the object store did not return {self.name!r} ({type(error).__name__}): see the server's log")


class BucketSource(WeightSource):
    """Read `SCHEME://bucket/key` through fsspec, with the credentials of the server's user."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self._options = options
        self._file_system: Any = None
        self._lock = threading.Lock()
        self._pieces = Pieces()

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[str]:
        """Return the address itself, if it is well-formed."""
        del folders
        path = address.removeprefix(f"{self.name}://")
        if path == address or not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
            raise WeightsUnavailable(f"{address!r} is not a bucket address: write {self.name}://bucket/folder/file")
        return [address]

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """Open the object at an address, the weight files of a folder, or an index and the shards in its folder."""
        path = address.removeprefix(f"{self.name}://").rstrip("/")
        try:
            entry = self._find_objects(path, permissions)
        except FileNotFoundError:
            raise WeightsUnavailable(f"the bucket has no object or folder {address!r}") from None
        if not entry or len(entry) > _MAX_FILES:
            raise WeightsUnavailable(f"{address!r} has {len(entry) or 'no'} weight files: name 1 to {_MAX_FILES:,}")
        return [BucketFile(self._system(), info, self._pieces) for info in entry]

    def _system(self) -> Any:
        with self._lock:
            if self._file_system is None:
                import fsspec  # imported late, because most servers read no bucket

                # Cached listings would grow, and hide new versions.
                self._file_system = fsspec.filesystem(
                    self.name, skip_instance_cache=True, use_listings_cache=False, **self._options
                )
            return self._file_system

    def _find_objects(self, path: str, permissions: WeightPermissions) -> list[Mapping[str, Any]]:
        info = self._system().info(path)
        if info["type"] == "directory":
            return self._weight_files(path, permissions.suffixes)
        if not path.endswith(_INDEX):
            return [info]
        # The shards are the files with the same suffix in the index's folder.
        folder, kind = path.rpartition("/")[0], path.removesuffix(_INDEX).rpartition(".")[2]
        shards = self._weight_files(folder, (f".{kind}",))
        return [info, *(shard for shard in shards if allows(permissions, f"{self.name}://{self._key(shard)}"))]

    def _weight_files(self, folder: str, suffixes: tuple[str, ...]) -> list[Mapping[str, Any]]:
        entries = self._system().ls(folder, detail=True)
        weight_files = (entry for entry in entries if entry["type"] == "file" and self._key(entry).endswith(suffixes))
        return sorted(weight_files, key=self._key)

    @staticmethod
    def _key(info: Mapping[str, Any]) -> str:
        return str(info["name"]).lstrip("/")


def _version(info: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None)
