"""Save values of a session to a safetensors file, at an address that the client names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from djinn_core.errors import WeightsUnavailable
from djinn_server.builtins.safetensors_files import make_header
from djinn_server.builtins.weights import UNFINISHED, remove_abandoned
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.weight_sources import WeightFile, WeightSink

MAX_FILES: Final = 10_000  # saved files of a tenant
_COMPARED: Final = 1 << 20  # bytes of a file that are compared at a time


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    create: Callable[[int], WeightSink],
    deliver: Callable[[torch.Tensor], torch.Tensor],
) -> int:
    """Write tensors to a safetensors file, and return the size of the file in bytes.

    Args:
        tensors: values on the device.
        metadata: the metadata of the file's header.
        create: creates a file of a given size in bytes.
        deliver: copies a tensor to host memory.

    Raises:
        WeightsUnavailable: the file may not be written. After each of these errors, an existing file is unchanged.
        OSError: the file cannot be written.
        ValueError: the format cannot store one of the tensors.
        RuntimeError: there is no host memory for a tensor.
    """
    tensors_by_size = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # this order aligns them
    header = make_header({name: (value.dtype, tuple(value.shape)) for name, value in tensors_by_size.items()}, metadata)
    size = len(header) + sum(value.numel() * value.dtype.itemsize for value in tensors_by_size.values())
    sink = create(size)
    try:
        sink.write(memoryview(header))
        for tensor in tensors_by_size.values():
            if tensor.numel():
                sink.write(_bytes(deliver(tensor)))
        sink.commit()
    finally:
        sink.discard()
    return size


class DifferentContents(Exception):  # noqa: N818 - a result, and no failure
    """The existing file differs from the data that would be written."""


class ComparingSink(WeightSink):
    """A `WeightSink` that compares the data with an existing file instead of writing.

    Its methods raise `DifferentContents` if the data differs.
    """

    def __init__(self, file: WeightFile, size: int) -> None:
        self._file = file
        self._version = file.version()
        self._at = 0
        self._check(file.size == size)

    def write(self, data: memoryview) -> None:
        """Compare the next bytes with the file. Raise `DifferentContents` if they differ."""
        while data:
            existing = bytearray(min(len(data), _COMPARED))
            self._file.read_into(self._at, memoryview(existing))
            self._check(data[: len(existing)] == existing)
            self._at, data = self._at + len(existing), data[len(existing) :]

    def commit(self) -> None:
        """Write nothing. Raise `DifferentContents` if the existing file changed during the comparison."""
        self._check(self._file.version() == self._version)

    def discard(self) -> None:
        """Do nothing: no file was created."""

    def _check(self, same: bool) -> None:
        if not same:
            raise DifferentContents


def _bytes(tensor: torch.Tensor) -> memoryview:
    with torch.inference_mode():
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return dense.view(-1).view(torch.uint8).numpy().data


class SavedBytes:
    """Quota check for a tenant's saved files, including files that its other executors saved."""

    def __init__(self, disk: DiskQuota, folder: Path, action: str = "saved", max_files: int = MAX_FILES) -> None:
        """Create the quota check of one tenant.

        Args:
            disk: the tenant's disk quota.
            folder: folder of the tenant's files.
            action: participle for messages, such as "saved".
            max_files: maximum number of files in `folder`.
        """
        self._disk = disk
        self._folder = folder
        self._action = action
        self._max_files = max_files

    def check(self, size: int) -> None:
        """Check the quota for a new file of `size` bytes, and charge it.

        Raises:
            WeightsUnavailable: the file exceeds the tenant's quota, the number of files, or the free disk space.
        """
        for folder in {self._folder, *(path.parent for path in self._folder.rglob(f".*{UNFINISHED}*"))}:
            remove_abandoned(folder)  # otherwise unfinished files would count
        sizes = self._sizes()
        if len(sizes) >= self._max_files:
            raise WeightsUnavailable(
                f"the tenant has {len(sizes):,} files {self._action} on the server; the limit is {self._max_files:,}: delete some on the server"
            )
        self._disk.set_usage(self._folder, sum(sizes))
        if too_much := self._disk.charge(self._folder, sum(sizes) + size, self._folder):
            raise WeightsUnavailable(f"{size:,} bytes cannot be {self._action}: {too_much}")

    def count(self) -> None:
        """Charge the tenant for the files in the folder, after files were removed."""
        self._disk.set_usage(self._folder, sum(self._sizes()))

    def _sizes(self) -> list[int]:
        file_sizes: list[int] = []
        for path in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                file_sizes += [path.lstat().st_size] if path.is_file() else []
        return file_sizes
