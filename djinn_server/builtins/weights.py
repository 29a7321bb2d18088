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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from djinn_core.errors import WeightsUnavailable
from djinn_core.hookspecs import hookimpl
from djinn_core.system.files import CLOEXEC, NOFOLLOW, NONBLOCK, pread_into, read_only, sync_folder
from djinn_core.system.processes import lock_file
from djinn_server.hookspecs.weight_sources import (
    INDEX,
    LocalPlace,
    WeightFile,
    WeightPermissions,
    WeightSink,
    WeightSource,
)
from djinn_server.system.mappings import allocate, map_privately, others_may_write
from djinn_server.weights.permissions import resolve

djinn_api_version = "2.0"

_MAX_FILES: Final = 4096
UNFINISHED: Final = ".unfinished-"  # marks the names of temporary files
_TRIES: Final = 100  # to create such a file while other processes remove abandoned ones


class LocalFile(WeightFile):
    """A weight file on the server's disk. It stays readable if another file replaces it.

    Attributes:
        path: path at which the file was opened.
    """

    def __init__(self, path: Path, name: str, immutable: bool = False) -> None:
        """Open a file.

        Args:
            path: the file.
            name: file name in the folder. `path` may be the target of a link.
            immutable: True if no process writes into the file or truncates it.

        Raises:
            OSError: the file cannot be opened.
        """
        self.name = name
        self.path = path
        self._immutable = immutable
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None
        # Without O_NONBLOCK, opening a named pipe would block.
        self._descriptor = os.open(path, os.O_RDONLY | CLOEXEC | NONBLOCK)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        self.size = status.st_size

    def version(self) -> str:
        """Return the version, as `WeightFile.version` does: inode, size and modification time."""
        status = os.fstat(self._descriptor)
        return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Read bytes into a buffer, as `WeightFile.read_into` does."""
        while buffer:
            count = pread_into(self._descriptor, buffer, start)
            if not count:
                raise OSError(f"{self.name!r} ends before byte {start + len(buffer)}")
            buffer, start = buffer[count:], start + count

    def keep_as(self, link: Path) -> None:
        """Create `link`, a hard link to this file.

        Raises:
            OSError: the link cannot be created, or another file has replaced this one.
        """
        os.link(self.path, link, follow_symlinks=False)
        if not os.path.samestat(link.lstat(), os.fstat(self._descriptor)):
            link.unlink()
            raise FileNotFoundError(errno.ENOENT, f"another file has replaced {self.name!r}")

    def map(self) -> mmap.mmap:
        """Map an immutable file, or a file on a read-only mount, as `WeightFile.map` does.

        Files that other users can write are not mapped: a truncation would kill this process.
        """
        is_immutable = self._immutable and not others_may_write(os.fstat(self._descriptor))
        if not (is_immutable or read_only(self._descriptor)):
            raise OSError(errno.EPERM, f"{self.name!r} cannot be mapped, because it may be written in place")
        with self._lock:
            mapping = self._mapping() if self._mapping is not None else None
            if mapping is None:
                mapping = map_privately(self._descriptor)
                self._mapping = weakref.ref(mapping)
            return mapping

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)  # no read is in progress: a read would hold the file


def open_folder(path: Path, permissions: WeightPermissions, immutable: bool = False) -> Sequence[WeightFile]:
    """Open a file, an index with its shards, or a folder's weight files. Links must not leave permitted folders.

    Args:
        path: the file or folder.
        permissions: the readable folders.
        immutable: True if these files can be mapped, because no process writes into them or truncates them. They may be
            replaced.

    Raises:
        WeightsUnavailable: the path does not exist, is not permitted or cannot be read.
    """
    target = resolve(permissions, path)
    try:
        names = [path]
        if target.is_dir():
            names = sorted(file for file in path.iterdir() if file.name.endswith(permissions.suffixes))
        elif path.name.endswith(INDEX):  # shards have the same format
            kind = Path(path.name.removesuffix(INDEX)).suffix
            names = [path, *sorted(file for file in path.parent.iterdir() if kind and file.suffix == kind)]
        if not names or len(names) > _MAX_FILES:
            raise WeightsUnavailable(
                f"{str(path)!r} has {len(names) or 'no'} files with weights: name a file, or a folder with 1 to {_MAX_FILES:,} of them"
            )
        return [LocalFile(resolve(permissions, file), file.name, immutable) for file in names]
    except OSError as error:
        raise WeightsUnavailable(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


class LocalSink(WeightSink):
    """A weight file that is being written to the server's disk, under a temporary name."""

    def __init__(self, path: Path, size: int, on_commit: Callable[[], None] = lambda: None) -> None:
        """Create the temporary file. `on_commit`: called at the end of `commit`.

        Raises:
            OSError: the file cannot be created, or the disk lacks `size` free bytes.
        """
        self.path, self._on_commit = path, on_commit
        remove_abandoned(path.parent)
        # The file is not secret: its mode follows the server's umask.
        for _ in range(_TRIES):
            self._temporary_path = path.with_name(f".{path.name}{UNFINISHED}{secrets.token_hex(8)}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOEXEC | NOFOLLOW
            self._descriptor = os.open(self._temporary_path, flags, 0o666)
            try:
                if _lock_new_file(self._descriptor):
                    allocate(self._descriptor, size)
                    return
            except BaseException:
                self.discard()
                raise
            self.discard()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def write(self, data: memoryview) -> None:
        """Write bytes, as `WeightSink.write` does."""
        while data:
            data = data[os.write(self._descriptor, data) :]

    def commit(self) -> None:
        """Rename the file to its final path, as `WeightSink.commit` does."""
        os.fsync(self._descriptor)
        self._temporary_path.replace(self.path)
        sync_folder(self.path.parent)
        self._close()
        self._on_commit()

    def discard(self) -> None:
        """Delete the temporary file, as `WeightSink.discard` does."""
        if self._descriptor >= 0:
            self._temporary_path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def _lock_new_file(descriptor: int) -> bool:
    """Lock a new file. Return False if another thread or process is removing it as abandoned."""
    try:
        lock_file(descriptor)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files that no process has locked, because the process that created them has ended."""
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
    """The weight source `file:`. A relative path is searched in each permitted folder."""

    name = "file"

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace]:
        """Return the candidate paths of an address, as `WeightSource.places` does."""
        # `?` and `#` are ordinary characters in file names, so a file has one spelling.
        path = Path(address.removeprefix("file:").removeprefix("//"))
        return [LocalPlace(folder / path) for folder in folders or (Path(),)]  # an absolute path stays as is

    def create(self, path: Path, size: int) -> WeightSink:
        """Create a file and its folders, as `WeightSource.create` does."""
        _check_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return LocalSink(path, size)
        except OSError as error:
            raise WeightsUnavailable(f"{path.name!r} cannot be written: {error.strerror or error}") from error

    def remove(self, path: Path, folders: Sequence[Path]) -> None:
        """Remove a file, as `WeightSource.remove` does."""
        _check_name(path)
        try:
            path.unlink()
        except OSError as error:
            raise WeightsUnavailable(f"{path.name!r} cannot be removed: {error.strerror or error}") from error
        stops = {folder.resolve() for folder in folders}
        with contextlib.suppress(OSError):  # a folder is not empty
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
    """Return the weight source `file:`."""
    return [FileSource()]
