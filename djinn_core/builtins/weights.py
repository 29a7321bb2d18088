"""The built-in weight source `file:`, which reads files on the server's disk."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from djinn_core.errors import WeightsUnavailable
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.weights import WeightFile, WeightPermissions, WeightSource

djinn_api_version = 1

_CANDIDATES: Final = (".safetensors", ".index.json")
_MOST_FILES: Final = 4096


class LocalFile:
    """A file on the server's disk, as `MappableFile`. What replaces it is not seen: the file that was opened is read."""

    def __init__(self, path: Path, name: str, immutable: bool = False) -> None:
        """Open a file.

        Args:
            path: the file.
            name: its name in its folder, where `path` may be what a link leads to.
            immutable: nothing writes into it or cuts it off.

        Raises:
            OSError: it cannot be opened.
        """
        self.name = name
        self._immutable = immutable
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None
        # Without O_NONBLOCK a named pipe would be waited for.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        self.size = status.st_size

    def version(self) -> str:
        """As `WeightFile.version`: its inode, its size, and when it was written last."""
        status = os.fstat(self._descriptor)
        return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"

    def read_into(self, start: int, buffer: memoryview) -> None:
        """As `WeightFile.read_into`."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], start)
            if not count:
                raise OSError(f"{self.name!r} ends before byte {start + len(buffer)}")
            buffer, start = buffer[count:], start + count

    def map(self) -> mmap.mmap:
        """As `MappableFile.map`, where it is immutable or on a disk that is mounted for reading only."""
        if not (self._immutable or os.fstatvfs(self._descriptor).f_flag & os.ST_RDONLY):
            raise OSError(errno.EPERM, f"{self.name!r} may be written in place")
        with self._lock:
            known = self._mapping() if self._mapping is not None else None
            if known is None:
                known = mmap.mmap(self._descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                known.madvise(mmap.MADV_WILLNEED)
                self._mapping = weakref.ref(known)
            return known

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)  # no read is under way: it would hold the file


def open_folder(path: Path, permissions: WeightPermissions, immutable: bool = False) -> Sequence[WeightFile]:
    """Open a file, or all files with weights in a folder; links in it must stay within the permitted folders.

    Args:
        path: the file or folder.
        permissions: what may be read.
        immutable: nothing writes into these files or cuts them off, although they may be replaced: they may be mapped into memory.

    Raises:
        WeightsUnavailable: there is nothing, or it may not or cannot be read.
    """
    found = permissions.resolve(path)
    try:
        names = [path]
        if found.is_dir():
            names = sorted(file for file in path.iterdir() if file.name.endswith(_CANDIDATES))
        elif path.name.endswith(".index.json"):
            names = [path, *sorted(path.parent.glob("*.safetensors"))]
        if not names or len(names) > _MOST_FILES:
            raise WeightsUnavailable(f"{str(path)!r} has {len(names) or 'no'} files with weights")
        return [LocalFile(permissions.resolve(file), file.name, immutable) for file in names]
    except OSError as error:
        raise WeightsUnavailable(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


class FileSource:
    """Reads `file:PATH`; a relative path is looked for in each of the permitted folders."""

    name = "file"

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """As `WeightSource.open`."""
        # `?` and `#` are parts of names: what follows them must not be other spellings of one file.
        path = Path(address.removeprefix("file:").removeprefix("//"))
        for folder in permissions.folders:
            try:
                permissions.resolve(folder / path)  # an absolute path is itself
            except WeightsUnavailable:
                continue
            return open_folder(folder / path, permissions)
        return open_folder(path, permissions)


@hookimpl
def djinn_register_weight_sources() -> Iterable[WeightSource]:
    """The weight source `file:`."""
    return [FileSource()]
