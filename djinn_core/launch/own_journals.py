"""Session journals of a program's own executors: a private directory, removed with the program."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

from djinn_core.directories import cache_directory
from djinn_core.launch.private_directory import JUST_MADE_SECONDS, remove_unless_held
from djinn_core.logs import get_logger
from djinn_core.system.files import CLOEXEC, DIRECTORY, user_id
from djinn_core.system.processes import lock_file

LIMIT: Final = 8 << 30  # bytes of one journal
SHARE: Final = 4  # of what is free on the disk, one part; a journal that is compacted is there twice for a moment
LEAST: Final = 64 << 20  # with less room there is none
_log = get_logger("djinn.launch")


class OwnJournals:
    """A directory that only this user can enter. It is removed when this is closed or collected, and when the process ends.

    Where the process is killed, the next program that makes one removes it.
    """

    def __init__(self, base: Path) -> None:
        """Make one in `base`.

        Raises:
            OSError: there cannot be one.
        """
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if base.lstat().st_uid != user_id() or base.is_symlink():
            raise PermissionError(f"{base} belongs to another user")
        _remove_abandoned(base)
        self.path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
        held = os.open(self.path, os.O_RDONLY | DIRECTORY | CLOEXEC)
        lock_file(held)
        self._end = weakref.finalize(self, _remove, self.path, held, os.getpid())

    @property
    def empty(self) -> bool:
        """True if no session has left a journal."""
        return not any(self.path.glob("*.journal"))

    def room(self) -> int:
        """Number of bytes that all journals together may have."""
        return shutil.disk_usage(self.path).free // SHARE

    def close(self) -> None:
        """Remove it. Calling it again does nothing."""
        self._end()


def own_journals() -> OwnJournals | None:
    """A directory in the user's cache, or else where temporary files are; None if there is no room, which the log says."""
    errors: list[str] = []
    for base in _bases():
        try:
            made = OwnJournals(base)
        except OSError as error:
            errors.append(str(error))
            continue
        if made.room() >= LEAST:
            return made
        errors.append(f"{base} is on a disk that has {made.room() * SHARE:,} bytes left")
        made.close()
    _log.warning("an executor of this program's own will not be replaced if it dies: no journals", reasons=errors)
    return None


def _bases() -> tuple[Path, Path]:
    return cache_directory() / "own-journals", Path(tempfile.gettempdir()) / f"djinn-own-journals-{user_id()}"


def _remove_abandoned(base: Path) -> None:
    """Remove the directories of programs that were killed."""
    for path in base.iterdir():
        with contextlib.suppress(OSError):  # a process holds it, or it has just been removed
            if time.time() - path.stat().st_mtime >= JUST_MADE_SECONDS:
                remove_unless_held(path)


def _remove(path: Path, held: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child
    shutil.rmtree(path, ignore_errors=True)
    os.close(held)
