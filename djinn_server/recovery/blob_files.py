"""Blob files of a journal: weights that the journal names by digest, in files shared with the weight store.

An upload for the weight store is written to a blob file while it arrives. Then the store creates a hard link to the file.
If the store already has a blob, the journal creates a hard link to the store's file. Either link can be deleted without an
effect on the other link. Files are named by digest. A complete file is never written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import numpy as np

from djinn_core.errors import SessionLost
from djinn_core.hookspecs.transports import Frame
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.record_log import Buffers, body_checksum, sizes_of
from djinn_core.system.files import CLOEXEC, NOFOLLOW, pwrite
from djinn_core.wire.compression import expanded
from djinn_core.wire.digests import digest_of_content, digest_of_file
from djinn_core.wire.frames import Buffer, allocate, flatten
from djinn_core.wire.messages import decode, encode
from djinn_core.wire.tensors import dtype_from_name
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.recovery.log_records import BlobFrame
from djinn_server.system.private_files import open_private

BLOB_BYTES: Final = 1 << 20  # least size of a buffer that a snapshot writes to a blob file
_log = get_logger("djinn.server")


@attrs.define
class _UnfinishedBlob:
    digest: bytes
    size: int
    written: int


class BlobFiles:
    """Blob files of one session's journal. One thread at a time uses them. Any thread may call `mark_verified`.

    Attributes:
        used_weights: versions of weight files that the current snapshot uses. `retain` does not delete these files.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: folder of the files, created with the first file."""
        self._folder = folder
        self._unfinished: dict[int, _UnfinishedBlob] = {}
        self._verified: set[bytes] = set()  # digests of files whose contents were checked
        self.used_weights: set[bytes] = set()
        self._folder_lock = threading.Lock()
        self._has_ended = False

    # --- uploads ----------------------------------------------------------------------------------------------

    def expect(self, handle: int, digest: bytes, size: int, is_replay: bool = False) -> bool:
        """Start a blob file for an upload. Return False if the file exists or is already being written.

        `is_replay`: True to continue a file that an earlier process has begun.

        Raises:
            OSError: the file cannot be created.
        """
        path, written_bytes = self.path(digest), 0
        if self._is_unfinished(digest):
            return False
        try:
            with self._folder_for_writing():
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | CLOEXEC, 0o600))
        except FileExistsError:
            written_bytes = path.stat().st_size
            if not is_replay or written_bytes > size:
                return False
        self._unfinished[handle] = _UnfinishedBlob(digest, size, written_bytes)
        return True

    def write_part(self, frame: Frame) -> tuple[Frame, BlobFrame] | None:
        """Write a frame with a part of an upload to its blob file. Return the frame and the journal's reference to it.

        The returned frame is decompressed. Return None if the frame has no blob file, does not fit into the file,
        or the store has already linked the file.

        Raises:
            OSError: the part cannot be written.
            ProtocolError: the part cannot be decompressed.
        """
        if not self._unfinished or len(frame.body) != 1:
            return None
        upload = decode(frame.head)
        blob = self._unfinished.get(upload.handle) if isinstance(upload, UploadPart) else None
        if blob is None or not isinstance(upload, UploadPart):
            return None
        data = flatten(_decompressed(upload, frame.body[0]))
        if not 0 <= upload.start <= blob.written or upload.start + len(data) > blob.size:
            del self._unfinished[upload.handle]  # the session will refuse it, too
            return None
        if not self._write(blob, upload.start, data):
            return None
        head = encode(msgspec.structs.replace(upload, compression="", length=0)) if upload.compression else frame.head
        return Frame(head, [data]), BlobFrame(head, blob.digest, upload.start, len(data), body_checksum([data]))

    def _write(self, blob: _UnfinishedBlob, start: int, data: memoryview) -> bool:
        """Write a part of a blob. Return False, and write nothing, if the store has linked the file."""
        file = os.open(self.path(blob.digest), os.O_WRONLY | NOFOLLOW | CLOEXEC)
        try:
            if os.fstat(file).st_nlink > 1:
                return False
            end = _write_all(file, data, start)
        finally:
            os.close(file)
        blob.written = max(blob.written, end)
        return True

    def finish(self, handle: int) -> Path | None:
        """Finish the upload of `handle`. Return the path of its complete file, or None if the file is incomplete."""
        blob = self._unfinished.pop(handle, None)
        return self.path(blob.digest) if blob is not None and blob.written == blob.size else None

    def link(self, digest: bytes, file: Path) -> None:
        """Create a hard link to the store's file with this digest. If this fails, the journal depends on the store."""
        try:
            with self._folder_for_writing():
                os.link(file, self.path(digest), follow_symlinks=False)
        except FileExistsError:
            return
        except OSError as error:
            _log.info("a journal depends on the weight store: cannot link", digest=digest.hex(), reason=str(error))
            return
        self._verified.add(digest)

    def mark_verified(self, digest: bytes) -> None:
        """Record that the file of a digest has been verified. Thread-safe."""
        self._verified.add(digest)

    # --- complete files ---------------------------------------------------------------------------------------

    def find(self, digest: bytes, size: int) -> Path | None:
        """Return the path of the file with this digest and size. Return None if it is missing, incomplete or wrong."""
        path = self.path(digest)
        try:
            if path.stat().st_size != size or self._is_unfinished(digest):
                return None
            if digest not in self._verified and digest_of_file(path) != digest:
                return None
        except OSError:
            return None
        self._verified.add(digest)
        return path

    def sizes(self) -> set[int]:
        """Return the sizes of the verified files."""
        sizes = set()
        for digest in tuple(self._verified):
            try:
                sizes.add(self.path(digest).stat().st_size)
            except FileNotFoundError:  # deleted with an earlier snapshot
                self._verified.discard(digest)
        return sizes

    def write_large(self, memory: Buffers, charge: Callable[[int], None]) -> dict[int, bytes]:
        """Find or write a blob file for each large buffer of a snapshot. Return the digests by position of the buffer.

        No buffer is read twice. `charge`: called before each new file with the bytes of all new files, including it.

        Raises:
            OSError: `charge` raised it, or a file cannot be written.
            RuntimeError, MemoryError: a buffer cannot be read.
        """
        file_sizes, written_bytes = self.sizes(), 0
        digests: dict[int, bytes] = {}
        for position, size in enumerate(sizes_of(memory)):
            if size < BLOB_BYTES and size not in file_sizes:
                continue
            data = flatten(memory[position])
            digest = digest_of_content(data)
            if self.find(digest, size) is None:
                if size < BLOB_BYTES:
                    continue
                written_bytes += size
                charge(written_bytes)
                self._write_file(digest, data)
            digests[position] = digest
        return digests

    def _write_file(self, digest: bytes, data: memoryview) -> None:
        self._unfinished = {handle: blob for handle, blob in self._unfinished.items() if blob.digest != digest}
        unfinished = self.path(digest).with_suffix(".new")  # so that a crash leaves no incomplete file under a digest
        with self._folder_for_writing():
            file = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | NOFOLLOW | CLOEXEC, 0o600)
            try:
                _write_all(file, data, 0)
            finally:
                os.close(file)
            unfinished.replace(self.path(digest))
        self._verified.add(digest)

    @contextlib.contextmanager
    def _folder_for_writing(self) -> Iterator[None]:
        """Create the folder. Inside the block, `end` does not remove it.

        Raises:
            OSError: the session has ended, or the folder cannot be created.
        """
        with self._folder_lock:
            if self._has_ended:
                raise OSError(errno.ESTALE, "the session has ended")
            self._folder.mkdir(mode=0o700, exist_ok=True)
            yield

    def digests(self) -> set[bytes]:
        """Return the digests of all blob files, which are their names."""
        return {bytes.fromhex(path.name) for path in self._files() if not path.suffix}

    def own_bytes(self, digests: set[bytes] | None = None) -> int:
        """Return the bytes of files without another hard link.

        `digests`: count only files that `retain(digests)` would not delete; None: count all files.
        """
        return own_bytes_of(self._folder, None if digests is None else self._names(digests))

    def retain(self, digests: set[bytes]) -> None:
        """Delete all blob files except those in `digests` and `used_weights`."""
        names = self._names(digests)
        for path in self._files():
            if path.name not in names:
                path.unlink(missing_ok=True)
        self._verified &= digests

    def _names(self, digests: set[bytes]) -> set[str]:
        return {digest.hex() for digest in digests | self.used_weights}

    def end(self) -> None:
        """Delete all blob files."""
        self._unfinished.clear()
        self._verified.clear()
        with self._folder_lock:  # then a snapshot in another thread creates no further file
            self._has_ended = True
            remove_contents(self._folder)

    def path(self, digest: bytes) -> Path:
        """Return the path of the file for a digest, which may not exist."""
        return self._folder / digest.hex()

    def _is_unfinished(self, digest: bytes) -> bool:
        return any(blob.digest == digest for blob in self._unfinished.values())

    def _files(self) -> list[Path]:
        """Return blob files and unfinished `.new` files, but not those that NFS creates for deleted open files."""
        try:
            return [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        except FileNotFoundError:
            return []


def _write_all(file: int, data: memoryview, start: int) -> int:
    """Write `data` at offset `start`. Return the offset after the data."""
    while data:
        count = pwrite(file, data, start)
        data, start = data[count:], start + count
    return start


def contents_folder(journal: Path) -> Path:
    """Return the folder of the blob files of a journal. `journal`: path of the journal."""
    return journal.with_suffix(".contents")


def own_bytes_of(folder: Path, names: Collection[str] | None = None) -> int:
    """Return the bytes of files in a folder without another hard link. `names`: count only these files; None: all."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if names is None or path.name in names:
                with contextlib.suppress(FileNotFoundError):  # another thread ends the session
                    status = path.stat()
                    total += status.st_size if status.st_nlink == 1 else 0
    return total


def remove_contents(folder: Path) -> None:
    """Remove the blob files of a journal. Another process may remove them at the same time."""
    shutil.rmtree(folder, ignore_errors=True)


def read_part(folder: Path, part: BlobFrame) -> Frame:
    """Read a frame from a blob file. `part`: the journal's reference to the file.

    Raises:
        SessionLost: the file has changed.
    """
    view = allocate(part.length)
    with _open_blob(folder, part.digest) as file:
        file.seek(part.start)
        count = file.readinto(view)
    if count != part.length:
        raise SessionLost(f"a journal's blob file is truncated: {count} of {part.length} bytes")
    if body_checksum([view]) != part.checksum:
        raise SessionLost("the blob file of a journal has changed (wrong checksum); the session cannot be recovered")
    return Frame(part.head, [view])


def map_file(folder: Path, digest: bytes) -> memoryview:
    """Memory-map the blob file with this digest copy-on-write, and return its bytes.

    Raises:
        SessionLost: the file cannot be read, or its contents have another digest.
    """
    with _open_blob(folder, digest) as file:
        mapping: Any = np.memmap(file, np.uint8, "c").view(np.ndarray)
    if digest_of_content(mapping.data) != digest:
        raise SessionLost("the blob file of a journal has changed (wrong checksum); the session cannot be recovered")
    return memoryview(mapping).cast("B")


@contextlib.contextmanager
def _open_blob(folder: Path, digest: bytes) -> Iterator[BufferedReader]:
    """Open a blob file. It must be a regular file of this user only.

    Raises:
        SessionLost: the file cannot be read.
    """
    try:
        with open_private(folder / digest.hex()) as file:
            yield file
    except (OSError, ValueError) as error:
        raise SessionLost(f"cannot read a journal's blob file: {error}") from error


def _decompressed(upload: UploadPart, part: Buffer) -> Buffer:
    if not upload.compression:
        return part
    return expanded(part, upload.compression, dtype_from_name(upload.dtype).itemsize, upload.length)
