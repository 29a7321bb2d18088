"""Device time that a tenant has used in the current hour, in a file that the tenant's next executor continues."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import Final, Self

from djinn_core.system.files import CLOEXEC, NOFOLLOW, pread, pwrite

HOUR: Final = 3600.0
_LAYOUT: Final = struct.Struct("<dd")  # when the hour began, on the clock of all processes, and seconds used in it


class UsageQuota:
    """Device time that a tenant has used in the current hour, stored in a file of the tenant.

    `tick` also writes the seconds of the running turn to the file. So a submission that kills the process is charged.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """`memory`: content of the file, of an earlier executor or empty."""
        self._memory = memory if memory is not None else bytearray(_LAYOUT.size)
        self._lock = threading.Lock()
        began, self._used = _LAYOUT.unpack_from(self._memory)
        now = time.perf_counter()
        self._began: float = began if 0.0 < began <= now else now  # the clock begins again with the machine

    @classmethod
    def of(cls, tenant: str, folder: Path) -> Self:
        """Open the file of a tenant in a folder of the server.

        Raises:
            OSError: the file cannot be opened or written.
        """
        path = folder / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW | CLOEXEC, 0o600)
        try:
            # Write the bytes: on a full disk, a store to a mapped hole would kill the executor.
            pwrite(descriptor, pread(descriptor, _LAYOUT.size, 0).ljust(_LAYOUT.size, b"\0"), 0)
            return cls(mmap.mmap(descriptor, _LAYOUT.size))
        finally:
            os.close(descriptor)

    def used(self) -> tuple[float, float]:
        """Return the seconds used in this hour, and the seconds until the next hour begins."""
        with self._lock:
            now = time.perf_counter()
            if now - self._began >= HOUR:
                self._began, self._used = now, 0.0
                self._write()
            return self._used, HOUR - (now - self._began)

    def charge(self, seconds: float) -> None:
        """Add device time."""
        with self._lock:
            self._used += seconds
            self._write()

    def tick(self, running: float) -> None:
        """Write the seconds of the running turn to the file. `charge` adds them when the turn ends."""
        with self._lock:
            self._write(running)

    def _write(self, running: float = 0.0) -> None:
        _LAYOUT.pack_into(self._memory, 0, self._began, self._used + running)
