"""Private directories: only their owner may write to them; permissions are checked before anything is stored there."""

from __future__ import annotations

from pathlib import Path

from djinn_core.errors import ConfigurationError
from djinn_core.system.files import mode_of, user_id


def private_directory(path: Path, what: str) -> Path:
    """The directory, made with mode 0700 where there is none.

    Args:
        path: where it is.
        what: what lies in it, for the message.

    Raises:
        ConfigurationError: others may write to it, or it belongs to another user.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private_directory(path, what)
    return path


def check_private_directory(path: Path, what: str) -> None:
    """Raise `ConfigurationError` where other users may write to an existing directory, or own it.

    A user who can write there can replace what the server trusts: a certificate, a journal, weights.
    """
    status = path.stat()
    if mode_of(status) & 0o022 or status.st_uid not in {user_id(), 0}:
        raise ConfigurationError(
            f"others on this machine can write to {path}, where {what} are kept: chmod 700 {path}, or name a directory of "
            "your own"
        )
