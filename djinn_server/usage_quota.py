"""Device time that a tenant has used in the current hour. A file keeps it for the tenant's next executor."""

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
_LAYOUT: Final = struct.Struct("<dd")  # start of the hour (`time.perf_counter`), and device seconds used in it


class UsageQuota:
    """Count the device time that a tenant has used in the current hour, in a file of the server.

    `tick` adds the running turn to the file, so that a submission is charged even if it kills the process.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """`memory`: mapping of the file; None: store nothing. The content is of an earlier executor, or zeros."""
        self._memory = memory if memory is not None else bytearray(_LAYOUT.size)
        self._lock = threading.Lock()
        began, self._used = _LAYOUT.unpack_from(self._memory)
        now = time.perf_counter()
        self._began: float = began if 0.0 < began <= now else now  # the clock restarts with the machine

    @classmethod
    def of(cls, tenant: str, folder: Path) -> Self:
        """Open the file of a tenant in `folder`, and create it if needed.

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
        """Add `seconds` of device time, and write the file."""
        with self._lock:
            self._used += seconds
            self._write()

    def tick(self, running: float) -> None:
        """Write the file, with `running` seconds of the turn that has not ended. `charge` adds them later."""
        with self._lock:
            self._write(running)

    def _write(self, running: float = 0.0) -> None:
        _LAYOUT.pack_into(self._memory, 0, self._began, self._used + running)
