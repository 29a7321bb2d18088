"""A tenant's device time within the hour, in a file where the tenant's next executor finds it."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import Final, Self

from djinn_core.system.files import CLOEXEC

HOUR: Final = 3600.0
_LAYOUT: Final = struct.Struct("<dd")  # when the hour began, on the clock of all processes, and seconds used in it


class UsageQuota:
    """Seconds of this hour in which the tenant had the device: from `begin` to `end`.

    They are written to the file while they pass (`tick`), so that a submission that ends the process midway is charged, too.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """`memory`: where an account before this one was kept, and this one is, too."""
        self._memory = memory if memory is not None else bytearray(_LAYOUT.size)
        self._lock = threading.Lock()
        self._running = 0
        self._since = time.perf_counter()
        began, self._used = _LAYOUT.unpack_from(self._memory)
        self._began: float = began or self._since

    @classmethod
    def of(cls, tenant: str, folder: Path) -> Self:
        """The one of `tenant` in a folder of the server's.

        Raises:
            OSError: it cannot be kept there.
        """
        path = folder / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _LAYOUT.size)
            return cls(mmap.mmap(descriptor, _LAYOUT.size))
        finally:
            os.close(descriptor)

    def used(self) -> tuple[float, float]:
        """Seconds that were used in this hour, and seconds until the next one."""
        with self._lock:
            now = time.perf_counter()
            if now - self._began >= HOUR:
                self._began, self._used = now, 0.0
                self._write()
            return self._used, HOUR - (now - self._began)

    def tick(self) -> None:
        """Write the time that has passed to the file."""
        with self._lock:
            if self._running:
                self._charge()

    def __enter__(self) -> None:
        self.begin(time.perf_counter())

    def __exit__(self, *_: object) -> None:
        self.end(time.perf_counter())

    def begin(self, now: float) -> None:
        """Begin to charge a session, at `now` on the clock `time.perf_counter`."""
        with self._lock:
            if not self._running:
                self._since = now
            self._running += 1

    def end(self, now: float) -> None:
        """Stop charging it."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self._used += now - self._since
                self._since = now
                _LAYOUT.pack_into(self._memory, 0, self._began, self._used)

    def _charge(self) -> None:
        now = time.perf_counter()
        self._used += now - self._since
        self._since = now
        self._write()

    def _write(self) -> None:
        _LAYOUT.pack_into(self._memory, 0, self._began, self._used)
