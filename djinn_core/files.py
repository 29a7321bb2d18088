"""Files that processes share: replaced as a whole, watched for changes, locked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from djinn_core.system.processes import lock_file


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, mode 0600, so that readers find the content before or this one, whole, also after a loss of power.

    Raises:
        OSError: it cannot be written there; the file is as it was.
    """
    # mkstemp makes files with mode 0600, and the rename is atomic because both are in one directory.
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink()
        raise


@attrs.frozen
class FileVersion:
    """Version of a file: differs after each write and each replacement."""

    written: int
    inode: int
    size: int


def version_of(path: Path) -> FileVersion:
    """The version of a file as it is now.

    Raises:
        OSError: it is not there.
    """
    status = path.stat()
    return FileVersion(status.st_mtime_ns, status.st_ino, status.st_size)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside `path`, which one process at a time can, for a change of what the file says.

    Raises:
        OSError: there cannot be one.
    """
    with (path.parent / f".{path.name}.lock").open("w") as file:
        lock_file(file.fileno(), wait=True)
        yield
