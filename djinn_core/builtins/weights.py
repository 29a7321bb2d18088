"""The built-in weight source `file:`, which reads files on the server's disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from djinn_core.errors import WeightsUnavailable
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.weights import WEIGHT_SUFFIXES, WeightFile, WeightPermissions, WeightSource

djinn_api_version = 1

_INDEX: Final = ".index.json"
_MOST_FILES: Final = 4096


class LocalFile:
    """A file on the server's disk, as `WeightFile`. What replaces it is not seen: the file that was opened is read."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises `OSError` where it cannot be opened. `name`: as in the folder, where `path` may be what a link leads to."""
        self.name = name
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

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)  # no read is under way: it would hold the file


def open_folder(path: Path, permissions: WeightPermissions) -> Sequence[WeightFile]:
    """Open a file, or all files with weights in a folder; links in it must stay within the permitted folders.

    Raises:
        WeightsUnavailable: there is nothing, or it may not or cannot be read.
    """
    found = permissions.resolve(path)
    try:
        names = [path]
        if found.is_dir():
            names = sorted(file for file in path.iterdir() if file.name.endswith(WEIGHT_SUFFIXES))
        elif path.name.endswith(_INDEX):  # the shards are files of its kind
            kind = Path(path.name.removesuffix(_INDEX)).suffix
            names = [path, *sorted(file for file in path.parent.iterdir() if kind and file.suffix == kind)]
        if not names or len(names) > _MOST_FILES:
            raise WeightsUnavailable(f"{str(path)!r} has {len(names) or 'no'} files with weights")
        return [LocalFile(permissions.resolve(file), file.name) for file in names]
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
