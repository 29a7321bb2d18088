"""Store of weights on disk, by the digest of their bytes. Clients need not send stored weights again.

The store is a directory of files that are named by digest. A file is written under a temporary name first, so it is
complete or absent. Several executor processes may share the directory. Each process checks the digest of a file before it
uses the file.
"""

from __future__ import annotations

import os
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import torch

from djinn_core.logs import get_logger
from djinn_core.wire.digests import ContentHash, digest_of_file
from djinn_server.disk_quota import DiskQuota

_log = get_logger("djinn.server")


CHUNK: Final = 8 << 20  # bytes that are hashed and written at a time
NEW_PREFIX: Final = "new-"  # prefix of files that are incomplete, or whose digest was not checked yet
STALE_SECONDS: Final = 3600.0  # age after which unfinished files are removed
QUEUED_LIMIT: Final = 1 << 30  # bytes that may wait to be written; beyond this limit uploads wait


@attrs.frozen
class _NewEntry:
    """A weight to be stored.

    Attributes:
        digest: digest of its bytes.
        data: its bytes, or a file with a temporary name in the store's directory.
        done: set after the entry was stored or dropped.
        on_verified: called with the digest after the file's bytes were checked.
    """

    digest: bytes
    data: torch.Tensor | Path
    done: threading.Event = attrs.field(factory=threading.Event)
    on_verified: Callable[[bytes], None] = lambda _: None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entry uses until it is stored."""
        return self.data.nbytes if isinstance(self.data, torch.Tensor) else 0


@attrs.define
class StoreCounters:
    """Counters of a store.

    Attributes:
        hits: number of lookups that found a weight.
        misses: number of lookups that found none.
        hit_bytes: bytes of the found weights.
        evictions: number of weights that were removed to free disk space.
    """

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    evictions: int = 0


class WeightStore:
    """Store of at most `limit` bytes in a directory. It evicts the least recently used weights."""

    def __init__(self, directory: Path, limit: int, disk: DiskQuota) -> None:
        """Create the store in a directory. `limit`: maximum bytes. `disk`: the tenant's disk quota.

        Raises:
            OSError: the directory cannot be created.
        """
        self.limit = limit
        self.counts = StoreCounters()
        self._disk = disk
        self._directory = directory
        self._verified: dict[bytes, int] = {}
        self._new_entries: queue.SimpleQueue[_NewEntry] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._queue_changed = threading.Condition()
        self._queued_bytes = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_unfinished()

    def of_tenant(self, tenant: str, limit: int) -> WeightStore:
        """Return the store of a tenant, which is a subdirectory without weights of other tenants.

        Args:
            tenant: name of the tenant; empty: return this store itself.
            limit: maximum bytes of the tenant's store; 0: the limit of this store.

        Raises:
            OSError: the directory of the tenant's store cannot be made.
        """
        if not tenant:
            return self
        return WeightStore(self._directory / "tenants" / tenant, min(limit or self.limit, self.limit), self._disk)

    def find(self, digest: bytes, size: int) -> torch.Tensor | None:
        """Return the bytes with this digest as a writable uint8 tensor, private to the caller.

        Return None if the store lacks them.
        """
        data = self._lookup(digest, size)
        with self._queue_changed:
            self.counts.misses += data is None
            self.counts.hits += data is not None
            self.counts.hit_bytes += size if data is not None else 0
        return data

    def _lookup(self, digest: bytes, size: int) -> torch.Tensor | None:
        path = self._path(digest)
        try:
            if not self._is_good(path, digest, size):
                return None
            os.utime(path)
            return mapped_bytes(path, size)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:
            _log.warning("a stored weight cannot be read", digest=digest.hex(), error=str(error))
            return None

    def put(self, digest: bytes, data: torch.Tensor) -> threading.Event:
        """Store `data` (uint8, contiguous, on the CPU) in the background. Return an event that is set afterwards.

        If the digest does not fit, for example because `data` was changed meanwhile, the data is not stored.
        """
        return self._enqueue(_NewEntry(digest, data))

    def adopt(self, digest: bytes, file: Path, on_verified: Callable[[bytes], None] = lambda _: None) -> bool:
        """Add a file to the store as a hard link. Return False if it cannot be linked.

        The digest is checked in the background. If it fits, `on_verified` is called with it. Nobody may write into the file
        any more.
        """
        path = self._path(digest)
        name = path.with_name(f"{NEW_PREFIX}{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.link(file, name)
        except OSError as error:
            _log.info("cannot link a file into the weight store", reason=str(error))
            return False
        self._enqueue(_NewEntry(digest, name, on_verified=on_verified))
        return True

    def file_of(self, digest: bytes) -> Path:
        """Return the path under which the store has or would have the bytes with this digest."""
        return self._path(digest)

    def _enqueue(self, entry: _NewEntry) -> threading.Event:
        with self._queue_changed:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_entries, name="djinn-store", daemon=True)
                self._writer.start()
            self._queue_changed.wait_for(lambda: self._queued_bytes < QUEUED_LIMIT)
            self._queued_bytes += entry.nbytes
        self._new_entries.put(entry)
        return entry.done

    def nbytes(self) -> int:
        """Return the bytes of all stored weights."""
        return self.contents()[1]

    def contents(self) -> tuple[int, int]:
        """Return the number of stored weights, and their bytes."""
        sizes = [status.st_size for _, status in self._files()]
        return len(sizes), sum(sizes)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._directory / name[:2] / name

    def _is_good(self, path: Path, digest: bytes, size: int) -> bool:
        """Return True if the file has this size and digest, and remove it if its digest differs.

        The digest of each file is checked once per process.
        """
        status = path.stat()
        if status.st_size != size:
            return False
        if self._verified.get(digest) == status.st_ino:
            return True
        if digest_of_file(path) != digest:
            _log.warning("a stored weight is damaged and was removed", file=str(path))
            path.unlink(missing_ok=True)
            return False
        self._verified[digest] = status.st_ino
        return True

    def _remove_unfinished(self) -> None:
        """Remove unfinished files of dead processes."""
        for path in self._directory.glob(f"??/{NEW_PREFIX}*"):
            try:
                if time.time() - path.stat().st_ctime > STALE_SECONDS:
                    path.unlink()
            except OSError as error:
                _log.debug("cannot remove an unfinished file of the weight store", path=str(path), reason=str(error))

    # --- in the background ------------------------------------------------------------------------------------

    def _write_entries(self) -> None:
        while True:
            entry = self._new_entries.get()
            try:
                if isinstance(entry.data, torch.Tensor):
                    self._write(entry.digest, entry.data)
                else:
                    self._take_over(entry, entry.data)
            except Exception as error:  # the thread must continue, because uploads wait for it
                _log.warning("a weight was not stored", digest=entry.digest.hex(), error=str(error))
            finally:
                with self._queue_changed:
                    self._queued_bytes -= entry.nbytes
                    self._queue_changed.notify_all()
                entry.done.set()
                del entry

    def _write(self, digest: bytes, data: torch.Tensor) -> None:
        path, size = self._path(digest), data.nbytes
        if size > self._allowed_bytes or path.exists():
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._make_room(size)
        if size > (free := self._disk.headroom(self._directory)):
            _log.warning("a weight was not stored: quota or disk is nearly full", bytes=size, free=free)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=NEW_PREFIX)
        try:
            with os.fdopen(handle, "wb") as file:
                written_digest = _copy_hashed(data, file.fileno())
            if written_digest == digest:
                Path(name).rename(path)
            else:
                _log.warning("an upload was not stored: its bytes do not have the digest that the client announced")
        finally:
            Path(name).unlink(missing_ok=True)

    def _take_over(self, entry: _NewEntry, name: Path) -> None:
        try:
            if digest_of_file(name) != entry.digest:
                _log.warning("an upload was not stored: its bytes do not have the digest that the client announced")
                return
            entry.on_verified(entry.digest)
            path, size = self._path(entry.digest), name.stat().st_size
            if size <= self._allowed_bytes and not path.exists():
                self._make_room(size)
                name.rename(path)
        finally:
            name.unlink(missing_ok=True)

    @property
    def _allowed_bytes(self) -> int:
        return self._disk.left_for_weights(self.limit)

    def shrink_to(self, limit: int) -> None:
        """Evict the least recently used weights until the store has at most `limit` bytes."""
        self._make_room(0, limit)

    def _make_room(self, size: int, limit: int | None = None) -> None:
        files = sorted(self._files(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(status.st_size for _, status in files)
        if limit is None:
            limit = min(self._allowed_bytes, total + self._disk.headroom(self._directory))
        for path, status in files:
            if total + size <= limit:
                return
            path.unlink(missing_ok=True)
            self.counts.evictions += 1
            total -= status.st_size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        files: list[tuple[Path, os.stat_result]] = []
        for path in self._directory.glob("??/*"):
            if path.name.startswith(NEW_PREFIX):
                continue
            try:
                files.append((path, path.stat()))
            except FileNotFoundError:  # another process has evicted it
                continue
        return files


def mapped_bytes(path: Path, size: int) -> torch.Tensor:
    """Return the first `size` bytes of a file as a private memory map, a uint8 tensor.

    Pages are read on access. Writes change only this process's memory.
    """
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _copy_hashed(data: torch.Tensor, file: int) -> bytes:
    """Write `data` to a file. Return the digest of the written bytes, even if `data` changes meanwhile."""
    view = data.numpy().data
    state = ContentHash()
    for start in range(0, len(view), CHUNK):
        part = bytes(view[start : start + CHUNK])
        state.update(part)
        remaining = memoryview(part)
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
    return state.digest()
