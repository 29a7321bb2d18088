"""Authentication: the tenant of a token, and its permissions and quota."""

from __future__ import annotations

import hmac
import threading
import time
from pathlib import Path
from typing import Final

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.files import FileVersion, version_of
from djinn_core.launch.token_table import OPERATOR, Quota, TokenRow, TokenTable, digest_of, read_table
from djinn_core.logs import get_logger
from djinn_core.server.gateway.tokens import Token

_log = get_logger("djinn.server")


@attrs.frozen
class Identity:
    """The identity of a client that showed a valid token.

    Attributes:
        tenant: name of the tenant that the client works for.
        token: id of the token; empty for the server's own one.
        monitor: True for a read-only token.
        expires: when the token expires, in seconds since 1970; 0: never.
        quota: limits of what the tenant may use.
    """

    tenant: str
    token: str = ""
    monitor: bool = False
    expires: float = 0.0
    quota: Quota = attrs.field(factory=Quota)

    @property
    def sees_all(self) -> bool:
        """True for an identity that may see what other tenants do: the operator, and the holder of a monitor token."""
        return self.tenant == OPERATOR or self.monitor


@attrs.frozen
class Denied:
    """A refused client. `reason`, `again` and `after` are for the client, as in `Refused`; `kind` is for logs and counters."""

    reason: str
    kind: str
    again: bool = False
    after: float = 0.0


_UNKNOWN: Final = Denied("the token is not the one that this server asks for: see its connection file", "token")


class Authenticator:
    """Checks tokens against the server's own one and a table, which may change while the server runs."""

    def __init__(self, token: Token, table: Path | None = None) -> None:
        """Raises `ConfigurationError` where the table cannot be used."""
        self._token = token
        self._file = table
        self._lock = threading.Lock()
        self._table = TokenTable()
        self._version: FileVersion | None = None
        self._trouble = ""
        if table is not None:
            self._table = read_table(table)
            self._version = version_of(table)

    @property
    def has_table(self) -> bool:
        """True if there are tokens besides the server's own."""
        return self._file is not None

    @property
    def tenants(self) -> frozenset[str]:
        """All that have a token that is good now."""
        return frozenset({OPERATOR, *(row.tenant for row in self._good_rows() if not row.monitor)})

    def identify(self, shown: str) -> Identity | Denied:
        """The identity of a token's owner, found in a time that reveals nothing about other tokens."""
        if self._token.matches(shown):
            return Identity(OPERATOR, quota=self._current().quotas.get(OPERATOR, Quota()))
        digest, found = digest_of(shown), None
        table = self._current()
        for row in table.tokens:
            if hmac.compare_digest(row.digest, digest):
                found = row
        if found is None:
            return _UNKNOWN
        if found.expired(time.time()):
            return Denied("this token has expired: ask for a new one", "expired")
        return Identity(found.tenant, found.id, found.monitor, found.expires, table.quotas.get(found.tenant, Quota()))

    def is_good(self, token: str) -> bool:
        """True if the token of that id has not been revoked and has not expired."""
        return not token or any(row.id == token for row in self._good_rows())

    def _good_rows(self) -> list[TokenRow]:
        now = time.time()
        return [row for row in self._current().tokens if not row.expired(now)]

    def _current(self) -> TokenTable:
        """The table as the file has it now; a file that cannot be read any more changes nothing."""
        if self._file is None:
            return self._table
        with self._lock:
            try:
                version = version_of(self._file)
                if version != self._version:
                    self._table, self._version, self._trouble = read_table(self._file), version, ""
                    _log.info("the table of tokens was read again", rows=len(self._table.tokens))
            except (OSError, ConfigurationError) as error:
                if str(error) != self._trouble:  # once: it is asked for with every connection
                    _log.error("the table of tokens cannot be read; what was read before holds", error=str(error))
                self._trouble = str(error)
            return self._table
