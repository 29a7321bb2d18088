"""Spill space for evicted tensors: an unlinked file, or host memory. The memory policy decides what is evicted."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import time
from pathlib import Path
from typing import Protocol

import attrs
import torch

from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.system.files import pread_into, pwrite
from djinn_server.disk_quota import STEP, DiskQuota
from djinn_server.system.memory import free_bytes

PAGE = 4096  # bytes; what lies in the file begins at a multiple of it
_ASSUMED = 1e9  # bytes a second, until something was measured
_MEMORY = 0.7  # how much of the speed that was known stays, when another is measured


@attrs.frozen
class SpillExtent:
    """Location in the spill space: first byte and size; in host memory the number of a block."""

    start: int
    size: int


class SpillSpace(Protocol):
    """Storage for evicted bytes. The speeds are bytes a second, as measured."""

    write_speed: float
    read_speed: float
    used: int

    def write(self, storage: torch.UntypedStorage) -> SpillExtent:
        """Spill the bytes of a storage.

        Raises:
            OSError: the disk or the host has no space for them.
        """

    def read(self, slot: SpillExtent, storage: torch.UntypedStorage) -> None:
        """Read spilled bytes into a storage of the same size.

        Raises:
            OSError: it cannot be read.
        """

    def free(self, slot: SpillExtent) -> None:
        """Free an extent."""

    def room(self) -> int:
        """Number of bytes that it can still take, approximately."""

    def close(self) -> None:
        """Forget everything."""


def octets(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage in host memory. Unlike numpy's view this leaves the storage resizable."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def bytes_on_device(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """The bytes of a storage as a tensor over it."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


@attrs.define(eq=False)
class FreeExtents:
    """Free ranges of a file, which are reused before the file grows."""

    end: int = 0
    _free: dict[int, list[int]] = attrs.field(factory=dict)

    def take(self, size: int) -> SpillExtent:
        """Allocate an extent of `size` bytes."""
        pages = -(-size // PAGE) * PAGE
        starts = self._free.get(pages)
        if starts:
            return SpillExtent(starts.pop(), size)
        larger = min((n for n, found in self._free.items() if found and n > pages), default=0)
        if larger:
            start = self._free[larger].pop()
            self._free.setdefault(larger - pages, []).append(start + pages)
            return SpillExtent(start, size)
        start, self.end = self.end, self.end + pages
        return SpillExtent(start, size)

    def give(self, slot: SpillExtent) -> None:
        """Free an extent."""
        self._free.setdefault(-(-slot.size // PAGE) * PAGE, []).append(slot.start)


class FileSpill:
    """An unlinked file: no other process can open it, and it is gone with this process, even after a crash."""

    def __init__(self, disk: DiskQuota, directory: Path | None = None) -> None:
        """`disk`: what the tenant has on disk. `directory`: where; None for the usual one for temporary files."""
        self._disk = disk
        self.write_speed = self.read_speed = _ASSUMED
        self.used = 0
        self._directory = directory
        self._file: int | None = None
        self._looked = 0  # how large it was when the disk was looked at
        self._gaps = FreeExtents()

    def write(self, storage: torch.UntypedStorage) -> SpillExtent:
        """As `SpillSpace.write`."""
        slot = self._gaps.take(storage.nbytes())
        began = time.perf_counter()
        try:
            if self._gaps.end > self._looked + STEP:
                self._look()
            self._write(octets(storage), slot.start)
        except OSError:
            self._gaps.give(slot)
            raise
        self.write_speed = _mixed(self.write_speed, slot.size, time.perf_counter() - began)
        self.used += slot.size
        return slot

    def _look(self) -> None:
        """Raises `OSError` where it would become too large."""
        if reason := self._disk.charge(self, self._gaps.end, self._directory or tempfile.gettempdir()):
            raise OSError(errno.EDQUOT, reason)
        self._looked = self._gaps.end

    def _write(self, data: memoryview, start: int) -> None:
        file = self._descriptor()
        while data:
            count = pwrite(file, data, start)
            data, start = data[count:], start + count

    def read(self, slot: SpillExtent, storage: torch.UntypedStorage) -> None:
        """As `SpillSpace.read`."""
        data, start, began = octets(storage), slot.start, time.perf_counter()
        while data:
            count = pread_into(self._descriptor(), data, start)
            if not count:
                raise OSError(f"the spill file ends at byte {start}")
            data, start = data[count:], start + count
        self.read_speed = _mixed(self.read_speed, slot.size, time.perf_counter() - began)

    def free(self, slot: SpillExtent) -> None:
        """As `SpillSpace.free`."""
        self._gaps.give(slot)
        self.used -= slot.size

    def room(self) -> int:
        """As `SpillSpace.room`."""
        return self._disk.headroom(self._directory or tempfile.gettempdir())

    def close(self) -> None:
        """As `SpillSpace.close`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._gaps, self.used, self._looked = FreeExtents(), 0, 0
        self._disk.release(self)

    def _descriptor(self) -> int:
        if self._file is None:
            self._file = _nameless(self._directory)
        return self._file


def _nameless(directory: Path | None) -> int:
    """A new file, readable for this user alone (0600), whose name is gone at once."""
    handle, name = tempfile.mkstemp(prefix="djinn-spill-", dir=directory)
    Path(name).unlink()
    return handle


class HostSpill:
    """Memory of the host, for devices that are not the host. Copies go through the runtime's page-locked blocks."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.write_speed = self.read_speed = _ASSUMED
        self.used = 0
        self._runtime = runtime
        self._blocks: dict[int, torch.Tensor] = {}
        self._number = 0

    def write(self, storage: torch.UntypedStorage) -> SpillExtent:
        """As `SpillSpace.write`."""
        if storage.nbytes() > self.room():
            raise OSError(
                errno.ENOMEM,
                f"cannot spill {storage.nbytes():,} bytes to host memory: the host has {self.room():,} bytes left",
            )
        self._runtime.synchronize()  # the copy would wait for earlier ops, which are not in its time then
        began = time.perf_counter()
        try:
            block = self._runtime.deliver(bytes_on_device(storage, self._runtime.device))
        except (RuntimeError, MemoryError) as error:
            raise OSError(errno.ENOMEM, f"cannot spill {storage.nbytes():,} bytes to host memory: {error}") from error
        self._number += 1
        self._blocks[self._number] = block
        self.used += block.nbytes
        self.write_speed = _mixed(self.write_speed, block.nbytes, time.perf_counter() - began)
        return SpillExtent(self._number, block.nbytes)

    def read(self, slot: SpillExtent, storage: torch.UntypedStorage) -> None:
        """As `SpillSpace.read`."""
        began = time.perf_counter()
        self.overwrite(storage, self._blocks[slot.start])
        self.read_speed = _mixed(self.read_speed, slot.size, time.perf_counter() - began)

    def overwrite(self, storage: torch.UntypedStorage, data: torch.Tensor) -> None:
        """Copy bytes of the host to a storage of the device."""
        self._runtime.overwrite(bytes_on_device(storage, self._runtime.device), data)

    def free(self, slot: SpillExtent) -> None:
        """As `SpillSpace.free`."""
        self.used -= slot.size
        del self._blocks[slot.start]

    def room(self) -> int:
        """As `SpillSpace.room`; other processes need host memory too, so this is half of the free memory."""
        return free_bytes() // 2

    def close(self) -> None:
        """As `SpillSpace.close`."""
        self._blocks.clear()
        self.used = 0


def spill_space(runtime: DeviceRuntime, disk: DiskQuota) -> SpillSpace:
    """The spill space of an executor on that device."""
    return FileSpill(disk) if runtime.device.type == "cpu" else HostSpill(runtime)


def _mixed(known: float, size: int, seconds: float) -> float:
    if size < 1 << 16:  # what is that small measures calls, not bytes
        return known
    return _MEMORY * known + (1 - _MEMORY) * size / max(seconds, 1e-9)
