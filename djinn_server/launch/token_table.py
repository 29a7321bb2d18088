"""Token table: a file with the access tokens of a server, by tenant, with expiry times and quotas.

The table stores digests of tokens, so reading the file gives no access. Tokens are random and long, so a fast digest is
as safe as a slow one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import msgspec

from djinn_core.errors import ConfigurationError
from djinn_core.system.files import mode_of, user_id
from djinn_core.system.shared_files import locked, replace_file
from djinn_server.hookspecs.quotas import Quota

PREFIX: Final = "djinn_"  # so that people, and scanners for leaked secrets, recognise a token
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class TokenRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token in the table. Times are in seconds since 1970. `expires`: 0: never. `monitor`: True for status only."""

    id: str
    tenant: str
    digest: str
    created: float
    expires: float = 0.0
    monitor: bool = False

    def expired(self, now: float) -> bool:
        """Return True if the token has expired at the time `now`."""
        return bool(self.expires) and now >= self.expires


class TokenTable(msgspec.Struct, frozen=True):
    """A token table: tokens, and quotas by tenant."""

    tokens: tuple[TokenRow, ...] = ()
    quotas: dict[str, Quota] = {}


# Created at import: msgspec crashes if two threads let it inspect a class for the first time at the same time.
_tables: msgspec.json.Decoder[TokenTable] = msgspec.json.Decoder(TokenTable)


def digest_of(token: str) -> str:
    """Return the digest of a token. The token table stores only the digest."""
    return hashlib.sha256(token.encode()).hexdigest()


def check_tenant(name: str) -> str:
    """Return `name` if it is a valid tenant name.

    Raises:
        ConfigurationError: the name is not valid.
    """
    if not _TENANT.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot be the name of a tenant: use at most 64 letters, digits, dots, dashes and underscores, "
            "beginning with a letter or digit"
        )
    return name


def create(table: TokenTable, tenant: str, seconds: float, monitor: bool = False) -> tuple[TokenTable, TokenRow, str]:
    """Return a table with a new token, the token's row, and the token's text. The table stores only a digest.

    Args:
        table: the table without the token.
        tenant: tenant of the token.
        seconds: lifetime of the token; 0: for ever.
        monitor: True if the token gives access to status, metrics and health only.
    """
    token, now = PREFIX + secrets.token_urlsafe(32), time.time()
    row = TokenRow(
        secrets.token_hex(4), check_tenant(tenant), digest_of(token), now, seconds and now + seconds, monitor
    )
    return msgspec.structs.replace(table, tokens=(*table.tokens, row)), row, token


def check_mode(path: Path, descriptor: int) -> None:
    """Check that no other user can read a file with secrets.

    If root owns the file, its group may read it, because orchestrators mount secrets in this way.

    Raises:
        ConfigurationError: another user can read or owns the file; the message says what to do.
    """
    status = os.fstat(descriptor)
    other_bits = 0o037 if status.st_uid == 0 != user_id() else 0o077
    if mode_of(status) & other_bits:
        raise ConfigurationError(
            f"other users of this machine can read the token file {path} (mode {mode_of(status):04o}): run "
            f"`chmod 600 {path}`, and create new tokens if another user may have read it"
        )
    if status.st_uid not in {user_id(), 0}:
        raise ConfigurationError(f"the token file {path} has the owner {status.st_uid}: run `chown {user_id()} {path}`")


def read_private(path: Path) -> bytes:
    """Return the content of a private file.

    Raises:
        OSError: the file cannot be read.
        ConfigurationError: other users may read the file.
    """
    with path.open("rb") as file:
        check_mode(path, file.fileno())
        return file.read()


def is_table(content: bytes) -> bool:
    """Return True if the content is a token table, False if it is one token as text."""
    return content.lstrip().startswith(b"{")


def parse_table(content: bytes, path: Path) -> TokenTable:
    """Parse the token table in a file. `path`: path of the file, for error messages.

    Raises:
        ConfigurationError: the file has no token table, or a tenant name in it is invalid.
    """
    try:
        table = _tables.decode(content)
        for row in table.tokens:
            check_tenant(row.tenant)
    except ConfigurationError as error:
        raise ConfigurationError(f"the token file {path} cannot be used: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not a token file of `djinn token create`: {error}") from error
    return table


def read_table(path: Path) -> TokenTable:
    """Read and parse the token table in a file.

    Raises:
        ConfigurationError: the file cannot be read, is not a token table, or may be read by other users.
    """
    try:
        return parse_table(read_private(path), path)
    except OSError as error:
        raise ConfigurationError(f"cannot read the token file {path}: {error.strerror or error}") from error


@attrs.define
class TableChange:
    """A token table that a block of `change_table` edits. Set `table` to the changed table."""

    table: TokenTable


@contextlib.contextmanager
def change_table(path: Path) -> Iterator[TableChange]:
    """Lock a file, and yield its token table, or an empty table. At the end of the block, write the changed table.

    Raises:
        ConfigurationError: the file cannot be read or written, or other users may read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(path):
            change = TableChange(read_table(path) if path.exists() else TokenTable())
            yield change
            replace_file(path, msgspec.json.format(msgspec.json.encode(change.table)) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write the token file {path}: {error.strerror or error}") from error
