"""Accounts of the operating system, and the right to start processes as another user."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from djinn_core.system.files import user_id

# Bits of Linux's capabilities: CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID, CAP_SETUID.
_NEEDED: Final = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
_STATUS: Final = Path("/proc/self/status")

if sys.platform == "win32":

    def find_account(name: str) -> tuple[int, int] | None:
        """Return None: executors do not run on Windows."""
        del name
        return None

    def give_files(folder: Path | str, user: int, group: int) -> None:
        """Do nothing: executors do not run on Windows."""
        del folder, user, group

else:

    def find_account(name: str) -> tuple[int, int] | None:
        """Return user id and group id of a user, or None if the user does not exist.

        `name` is a name or a user id. For an id without an account, the group id equals the user id.
        """
        import pwd  # Unix only; the simulated Windows has no such module either

        try:
            account = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        except KeyError:
            return (int(name), int(name)) if name.isdecimal() else None
        return account.pw_uid, account.pw_gid

    def give_files(folder: Path | str, user: int, group: int) -> None:
        """Make a user the owner of a folder and its files. So far, only this process may be able to change the folder.

        Raises:
            OSError: this process may not do that.
        """
        for path, _, files in os.walk(folder, topdown=False):
            for name in files:
                os.chown(Path(path, name), user, group, follow_symlinks=False)
            os.chown(path, user, group)


def missing_right() -> str:
    """Return the reason why this process cannot start processes as other users, as a predicate; empty if it can."""
    if user_id():
        return f"runs as the user {user_id()}, not as root"
    held_capabilities = capabilities()
    if missing := [
        name for name, bit in _NEEDED.items() if held_capabilities is not None and not held_capabilities >> bit & 1
    ]:
        return f"lacks {', '.join(missing)}"
    return ""


def capabilities() -> int | None:
    """Return the permitted and effective capabilities of this process as bits; None on a system without them."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["CapEff"], 16) | int(fields["CapPrm"], 16)
