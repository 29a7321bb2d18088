"""Directory for the session journals of a client program's executors. It is removed when the program ends."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from djinn_core.logs import get_logger
from djinn_core.system.directories import cache_directory
from djinn_core.system.files import CLOEXEC, DIRECTORY, user_id
from djinn_core.system.private_directories import remove_abandoned
from djinn_core.system.processes import lock_file
from djinn_server.system.private_files import make_private_folder

JOURNAL_BYTES: Final = 8 << 30  # maximum size of a journal
MIN_BYTES: Final = 64 << 20  # for all journals; with less space, no journals are written
_DISK_PART: Final = 4  # divisor of the free space: compaction needs a journal's space twice
_log = get_logger("djinn.launch")


def journal_space(directory: Path) -> int:
    """Return how many bytes all journals in a directory may have together: a quarter of the disk's free space."""
    return shutil.disk_usage(directory).free // _DISK_PART


class OwnJournals:
    """A directory for journals that only this user can enter.

    The directory is removed when this object is closed or garbage-collected, or when the process ends. If the process
    is killed, the next program removes the directory.
    """

    def __init__(self, base: Path) -> None:
        """Create a directory in `base`.

        Raises:
            OSError: the directory cannot be created.
        """
        make_private_folder(base)
        remove_abandoned(base, "*")
        self.path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
        lock = os.open(self.path, os.O_RDONLY | DIRECTORY | CLOEXEC)
        lock_file(lock)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    @property
    def empty(self) -> bool:
        """True if the directory has no journal."""
        return not any(self.path.glob("*.journal"))

    def close(self) -> None:
        """Remove the directory. Later calls do nothing."""
        self._end()


def own_journals() -> OwnJournals | None:
    """Return a directory for journals in the user's cache, or else in the temporary directory.

    If neither directory can be used or has enough space, log this and return None.
    """
    errors: list[str] = []
    for base in (cache_directory() / "own-journals", Path(tempfile.gettempdir()) / f"djinn-own-journals-{user_id()}"):
        try:
            journals = OwnJournals(base)
        except OSError as error:
            errors.append(str(error))
            continue
        if journal_space(journals.path) >= MIN_BYTES:
            return journals
        errors.append(f"{base} is on a disk that has {shutil.disk_usage(base).free:,} bytes left")
        journals.close()
    _log.warning("an executor of this program's own will not be replaced if it dies: no journals", reasons=errors)
    return None


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
