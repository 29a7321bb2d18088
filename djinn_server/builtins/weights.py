"""The built-in weight source `file:`, which reads files on the server's disk."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from djinn_core.errors import WeightsUnavailable
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.weight_sources import (
    INDEX,
    LocalPlace,
    WeightFile,
    WeightPermissions,
    WeightSink,
    WeightSource,
)
from djinn_core.system.files import CLOEXEC, NOFOLLOW, NONBLOCK, pread_into, read_only, sync_folder
from djinn_core.system.processes import lock_file
from djinn_server.system.mappings import allocate, mapped_privately, others_may_write
from djinn_server.weights.permissions import resolve

djinn_api_version = "2.0"

_MOST_FILES: Final = 4096
UNFINISHED: Final = ".unfinished-"  # in the names of files that are being written
_TRIES: Final = 100  # to make such a file, while others look for abandoned ones


class LocalFile(WeightFile):
    """A file on the server's disk, as `WeightFile`. What replaces it is not seen: the file that was opened is read.

    Attributes:
        path: where it was when it was opened.
    """

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
        self.path = path
        self._immutable = immutable
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None
        # Without O_NONBLOCK a named pipe would be waited for.
        self._descriptor = os.open(path, os.O_RDONLY | CLOEXEC | NONBLOCK)
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
            count = pread_into(self._descriptor, buffer, start)
            if not count:
                raise OSError(f"{self.name!r} ends before byte {start + len(buffer)}")
            buffer, start = buffer[count:], start + count

    def keep_as(self, link: Path) -> None:
        """Give the file a second name.

        Raises:
            OSError: it cannot have one there, or another file is at its place by now.
        """
        os.link(self.path, link, follow_symlinks=False)
        if not os.path.samestat(link.lstat(), os.fstat(self._descriptor)):
            link.unlink()
            raise FileNotFoundError(errno.ENOENT, "another file is at its place")

    def map(self) -> mmap.mmap:
        """As `WeightFile.map`, where it is immutable or on a disk that is mounted for reading only.

        What other users may write into is not: one that cuts it off would end this process.
        """
        kept = self._immutable and not others_may_write(os.fstat(self._descriptor))
        if not (kept or read_only(self._descriptor)):
            raise OSError(errno.EPERM, f"{self.name!r} may be written in place")
        with self._lock:
            known = self._mapping() if self._mapping is not None else None
            if known is None:
                known = mapped_privately(self._descriptor)
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
    found = resolve(permissions, path)
    try:
        names = [path]
        if found.is_dir():
            names = sorted(file for file in path.iterdir() if file.name.endswith(permissions.suffixes))
        elif path.name.endswith(INDEX):  # the shards are files of its kind
            kind = Path(path.name.removesuffix(INDEX)).suffix
            names = [path, *sorted(file for file in path.parent.iterdir() if kind and file.suffix == kind)]
        if not names or len(names) > _MOST_FILES:
            raise WeightsUnavailable(f"{str(path)!r} has {len(names) or 'no'} files with weights")
        return [LocalFile(resolve(permissions, file), file.name, immutable) for file in names]
    except OSError as error:
        raise WeightsUnavailable(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


class LocalSink(WeightSink):
    """A file on the server's disk that is being written beside its place, as `WeightSink`."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises `OSError` where it cannot be made, or the disk has no room for `size` bytes."""
        self.path = path
        remove_abandoned(path.parent)
        # The file is no secret: its mode is what the server's umask makes of it.
        for _ in range(_TRIES):
            self._aside = path.with_name(f".{path.name}{UNFINISHED}{secrets.token_hex(8)}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOEXEC | NOFOLLOW
            self._descriptor = os.open(self._aside, flags, 0o666)
            try:
                if _is_locked(self._descriptor):
                    allocate(self._descriptor, size)
                    return
            except BaseException:
                self.discard()
                raise
            self.discard()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def write(self, data: memoryview) -> None:
        """As `WeightSink.write`."""
        while data:
            data = data[os.write(self._descriptor, data) :]

    def commit(self) -> None:
        """As `WeightSink.commit`."""
        os.fsync(self._descriptor)
        self._aside.replace(self.path)
        sync_folder(self.path.parent)
        self._close()

    def discard(self) -> None:
        """As `WeightSink.discard`."""
        if self._descriptor >= 0:
            self._aside.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def _is_locked(descriptor: int) -> bool:
    """Lock a new file; False where another thread or process took it for an abandoned one before, and removes it."""
    try:
        lock_file(descriptor)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def remove_abandoned(folder: Path) -> None:
    """Remove files that a process which died was writing: those that none has locked."""
    for path in folder.glob(f".*{UNFINISHED}*"):
        try:
            descriptor = os.open(path, os.O_WRONLY | CLOEXEC | NOFOLLOW)
        except OSError:
            continue
        try:
            lock_file(descriptor)
            path.unlink(missing_ok=True)
        except OSError:
            pass
        finally:
            os.close(descriptor)


class FileSource(WeightSource):
    """Reads `file:PATH`; a relative path is looked for in each of the permitted folders. Writes it to the first folder for saving."""

    name = "file"

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace]:
        """As `WeightSource.places`."""
        # `?` and `#` are parts of file names: a file has one spelling.
        path = Path(address.removeprefix("file:").removeprefix("//"))
        return [LocalPlace(folder / path) for folder in folders or (Path(),)]  # an absolute path is itself

    def create(self, path: Path, size: int) -> WeightSink:
        """As `WeightSource.create`; folders are made."""
        _check_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return LocalSink(path, size)
        except OSError as error:
            raise WeightsUnavailable(f"{path.name!r} cannot be written: {error.strerror or error}") from error

    def remove(self, path: Path, folders: Sequence[Path]) -> None:
        """As `WeightSource.remove`."""
        _check_name(path)
        try:
            path.unlink()
        except OSError as error:
            raise WeightsUnavailable(f"{path.name!r} cannot be removed: {error.strerror or error}") from error
        stops = {folder.resolve() for folder in folders}
        with contextlib.suppress(OSError):  # it is not empty
            while path.parent not in stops:
                path = path.parent
                path.rmdir()


def _check_name(path: Path) -> None:
    if path.suffix != ".safetensors" or path.name == path.suffix:
        raise WeightsUnavailable(f"{path.name!r} cannot be saved: name a file that ends with .safetensors")
    if UNFINISHED in path.name:
        raise WeightsUnavailable(
            f"{path.name!r} contains {UNFINISHED!r}, which marks unfinished files: choose another name"
        )


@hookimpl
def djinn_register_weight_sources() -> Iterable[WeightSource]:
    """The weight source `file:`."""
    return [FileSource()]
