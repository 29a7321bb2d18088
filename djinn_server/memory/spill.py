"""Spill spaces: an unlinked file, and host memory for devices that are not the host."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import Final, Protocol

import attrs
import torch

from djinn_core.system.files import pread_into, pwrite
from djinn_server.disk_quota import STEP, DiskQuota
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.system.memory import free_bytes

PAGE: Final = 4096  # alignment of extents in the file, in bytes
HOST: Final = "host"
DISK: Final = "disk"


@attrs.frozen(eq=False)
class SpillExtent:
    """Spilled bytes.

    Attributes:
        space: the spill space that has the bytes.
        start: offset of the first byte in the file.
        size: number of bytes.
        block: host memory with the bytes; None if they are in the file.
    """

    space: SpillSpace
    start: int
    size: int
    block: torch.Tensor | None = None

    def unchanged(self) -> bool:
        """Return True, because spilled bytes do not change."""
        return True

    def read_into(self, buffer: memoryview) -> None:
        """Read the bytes into `buffer`, as `SourceBytes.read_into` does."""
        self.space.read(self, buffer)


class SpillSpace(Protocol):
    """Storage for evicted bytes.

    Attributes:
        location: `HOST` or `DISK`.
        used: number of spilled bytes in it.
    """

    location: str
    used: int

    def write(self, data: torch.Tensor) -> SpillExtent:
        """Spill a tensor of bytes that is in host memory, and return its extent.

        Raises:
            OSError: the disk or the host has too little free memory.
        """

    def read(self, extent: SpillExtent, buffer: memoryview) -> None:
        """Read the bytes of an extent into `buffer`.

        Raises:
            OSError: the bytes cannot be read.
        """

    def free(self, extent: SpillExtent) -> None:
        """Free an extent."""

    def free_bytes(self) -> int:
        """Return approximately how many more bytes can be spilled."""

    def close(self) -> None:
        """Free all spilled bytes."""


def octets(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage in host memory, without a copy.

    Unlike a view by numpy, the result leaves the storage resizable.
    """
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def bytes_on_device(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return a byte tensor that views a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


@attrs.define(eq=False)
class FreeExtents:
    """Free ranges of a file, which are reused before the file grows. Adjacent free ranges are merged.

    Attributes:
        end: offset after the last used range. There are no free ranges behind it.
    """

    end: int = 0
    _free: dict[int, int] = attrs.field(factory=dict)  # bytes of each range, by its first byte
    _by_end: dict[int, int] = attrs.field(factory=dict)  # the first byte of each range, by its end

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes in the smallest free range that is large enough. Return the offset of the first byte."""
        size = _in_pages(size)
        start = min(
            (at for at, free in self._free.items() if free >= size), key=self._free.__getitem__, default=self.end
        )
        if start == self.end:
            self.end += size
        elif remaining := self._remove(start) - size:
            self._add(start + size, remaining)
        return start

    def free_range(self, start: int, size: int) -> None:
        """Free `size` bytes at offset `start`, which were allocated together."""
        size = _in_pages(size)
        if (before := self._by_end.get(start)) is not None:
            start, size = before, size + self._remove(before)
        if start + size in self._free:
            size += self._remove(start + size)
        if start + size == self.end:
            self.end = start
        else:
            self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        self._free[start], self._by_end[start + size] = size, start

    def _remove(self, start: int) -> int:
        size = self._free.pop(start)
        del self._by_end[start + size]
        return size


def _in_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class FileSpill:
    """Spill space in an unlinked file.

    No other process can open the file. The system removes it when this process ends, even after a crash.
    """

    location = DISK

    def __init__(self, disk: DiskQuota, directory: Path | None = None) -> None:
        """`disk`: the tenant's disk quota. `directory`: directory of the file; None: the system's temporary directory."""
        self._disk = disk
        self.used = 0
        self._directory = directory
        self._file: int | None = None
        self._charged_bytes = 0  # file size that the quota counts
        self._extents = FreeExtents()

    def write(self, data: torch.Tensor) -> SpillExtent:
        """Write bytes to the file, and return their extent."""
        size = data.nbytes
        start = at = self._extents.allocate(size)
        try:
            if self._extents.end > self._charged_bytes + STEP:
                self._charge()
            file, data_left = self._descriptor(), octets(data.untyped_storage())
            while data_left:
                count = pwrite(file, data_left, at)
                data_left, at = data_left[count:], at + count
        except OSError:
            self._extents.free_range(start, size)
            raise
        self.used += size
        return SpillExtent(self, start, size)

    def _charge(self) -> None:
        """Charge the tenant's disk quota for the file.

        Raises:
            OSError: the file would become too large.
        """
        if reason := self._disk.charge(self, self._extents.end, self._directory or tempfile.gettempdir()):
            raise OSError(errno.EDQUOT, reason)
        self._charged_bytes = self._extents.end

    def read(self, extent: SpillExtent, buffer: memoryview) -> None:
        """Read the bytes of an extent."""
        start = extent.start
        while buffer:
            count = pread_into(self._descriptor(), buffer, start)
            if not count:
                raise OSError(f"the spill file ends at byte {start}")
            buffer, start = buffer[count:], start + count

    def free(self, extent: SpillExtent) -> None:
        """Free an extent, and truncate the file if its end is unused."""
        self._extents.free_range(extent.start, extent.size)
        self.used -= extent.size
        if self._file is not None and self._extents.end + STEP <= self._charged_bytes:
            os.ftruncate(self._file, self._extents.end)
            self._disk.set_usage(self, self._extents.end)
            self._charged_bytes = self._extents.end

    def free_bytes(self) -> int:
        """Return how many more bytes the disk and the tenant's quota allow."""
        return self._disk.headroom(self._directory or tempfile.gettempdir())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._extents, self.used, self._charged_bytes = FreeExtents(), 0, 0
        self._disk.release(self)

    def _descriptor(self) -> int:
        if self._file is None:
            self._file = _unlinked_file(self._directory)
        return self._file


def _unlinked_file(directory: Path | None) -> int:
    """Create an unlinked file that only this user can read, and return its descriptor."""
    handle, name = tempfile.mkstemp(prefix="djinn-spill-", dir=directory)
    Path(name).unlink()
    return handle


class HostSpill:
    """Spill space in host memory, for devices that are not the host."""

    location = HOST

    def __init__(self) -> None:
        self.used = 0

    def write(self, data: torch.Tensor) -> SpillExtent:
        """Store `data` in host memory, without a copy."""
        if data.nbytes > self.free_bytes():
            raise OSError(
                errno.ENOMEM,
                f"cannot spill {data.nbytes:,} bytes to host memory: {self.free_bytes():,} bytes are free for spills",
            )
        self.used += data.nbytes
        return SpillExtent(self, 0, data.nbytes, data)

    def read(self, extent: SpillExtent, buffer: memoryview) -> None:
        """Copy the stored bytes into `buffer`."""
        assert extent.block is not None
        buffer[:] = octets(extent.block.untyped_storage())[: extent.size]

    def free(self, extent: SpillExtent) -> None:
        """Subtract the bytes of an extent from `used`. Dropping the extent frees its memory."""
        self.used -= extent.size

    def free_bytes(self) -> int:
        """Return half of the free host memory, because other processes need memory too."""
        return free_bytes() // 2

    def close(self) -> None:
        """Set `used` to 0. Dropping the extents frees their memory."""
        self.used = 0


def spill_spaces(runtime: DeviceRuntime, disk: DiskQuota) -> tuple[SpillSpace, ...]:
    """Return the spill spaces of an executor, the preferred one first."""
    return (FileSpill(disk),) if runtime.device.type == "cpu" else (HostSpill(), FileSpill(disk))
