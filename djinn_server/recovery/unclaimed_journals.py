"""Journals of sessions without an executor, whose clients have not reconnected yet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from djinn_core.errors import SessionLost
from djinn_core.logs import get_logger
from djinn_core.system.files import CLOEXEC, NOFOLLOW
from djinn_core.system.processes import lock_file
from djinn_server.disk_quota import DiskQuota
from djinn_server.recovery.blob_files import contents_folder, own_bytes_of, remove_contents
from djinn_server.recovery.journal_reader import owner_of

_MAX_PAUSE: Final = 30.0  # seconds between two scans of the folder
_log = get_logger("djinn.server")


class UnclaimedJournals:
    """Remove unclaimed journals after a timeout. Until then, they count towards the tenant's disk quota.

    Several executors may scan the same folder. Thread-safe.
    """

    def __init__(
        self, folder: Path, seconds: float, disk: DiskQuota, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds`: lifetime of a journal, from the time at which this process first finds it without an executor."""
        self._folder = folder
        self._seconds = seconds
        self._disk = disk
        self._clock = clock
        self._tenant: str | None = None
        self._since: dict[Path, float] = {}
        self._next_scan = 0.0
        self._lock = threading.Lock()

    def count_for(self, tenant: str) -> None:
        """From now on, count the journals of this tenant towards its quota."""
        with self._lock:
            self._tenant = tenant
            self._scan(self._clock())

    def claim(self, journal: Path) -> None:
        """Stop tracking a journal as unclaimed, because this executor recovers its session."""
        with self._lock:
            self._since.pop(journal, None)
            self._disk.release(("unclaimed", journal))

    def scan_if_due(self) -> None:
        """Scan the folder, if a scan is due."""
        now = self._clock()
        with self._lock:
            if now >= self._next_scan:
                self._scan(now)

    def _scan(self, now: float) -> None:
        self._next_scan = now + min(_MAX_PAUSE, self._seconds / 4)
        unclaimed: dict[Path, float] = {}
        for path in (*self._folder.glob("*.journal"), *self._folder.glob("*.new")):
            since = self._since.get(path, now)
            try:
                if self._is_unclaimed(path, remove=now - since >= self._seconds):
                    unclaimed[path] = since
            except OSError as error:
                _log.debug("an unclaimed journal cannot be checked or removed", path=str(path), reason=str(error))
        for path in self._since.keys() - unclaimed.keys():
            self._disk.release(("unclaimed", path))
        self._since = unclaimed
        for folder in self._folder.glob("*.contents"):
            if not folder.with_suffix(".journal").exists():
                remove_contents(folder)

    def _is_unclaimed(self, path: Path, *, remove: bool) -> bool:
        """Return True if no executor uses a journal. With `remove`, remove such a journal and return False."""
        file = os.open(path, os.O_RDWR | NOFOLLOW | CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if not (size or remove):  # an executor has just created the file, and will lock it
                return True
            try:
                lock_file(file)
            except BlockingIOError:
                return False
            if not os.path.samestat(
                path.lstat(), os.fstat(file)
            ):  # its executor has just replaced the file by a snapshot
                return False
            if remove:
                path.unlink(missing_ok=True)
                if path.suffix == ".journal":
                    _log.warning(
                        "a session ends: its client did not reconnect", session=path.stem, seconds=self._seconds
                    )
                    remove_contents(contents_folder(path))
                return False
        finally:
            os.close(file)
        self._count(path, size)
        return True

    def _count(self, path: Path, size: int) -> None:
        try:
            own = self._tenant is not None and owner_of(path).badge.tenant == self._tenant
        except SessionLost:  # its first record is incomplete
            return
        if own:
            self._disk.set_usage(("unclaimed", path), size + own_bytes_of(contents_folder(path)))
