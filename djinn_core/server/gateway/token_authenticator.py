"""Authentication by token: the server's own one, and those of a table that may change while the server runs."""

from __future__ import annotations

import hmac
import threading
import time
from pathlib import Path

from djinn_core.errors import ConfigurationError
from djinn_core.files import FileVersion, version_of
from djinn_core.hookspecs.authentication import OPERATOR, Credentials, Denial, Identity
from djinn_core.hookspecs.quotas import Quota
from djinn_core.launch.token_table import TokenRow, TokenTable, digest_of, read_table
from djinn_core.logs import get_logger
from djinn_core.server.gateway.tokens import Token

_log = get_logger("djinn.server")


class TokenAuthenticator:
    """The built-in authenticator."""

    name = "tokens"

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

    def quota_of(self, tenant: str) -> Quota:
        """The tenant's quota in the table."""
        return self._current().quotas.get(tenant, Quota())

    def prepare(self) -> None:
        """As `Authenticator.prepare`: the table has been read."""

    def authenticate(self, credentials: Credentials) -> Identity | Denial | None:
        """The identity of a token's owner, found in a time that reveals nothing about other tokens."""
        if self._token.matches(credentials.token):
            return Identity(OPERATOR, quota=self.quota_of(OPERATOR))
        digest, found = digest_of(credentials.token), None
        table = self._current()
        for row in table.tokens:
            if hmac.compare_digest(row.digest, digest):
                found = row
        if found is None:
            return None
        if found.expired(time.time()):
            return Denial("this token has expired: ask for a new one", "expired")
        return Identity(found.tenant, found.id, found.monitor, table.quotas.get(found.tenant, Quota()))

    def is_valid(self, key: str) -> bool:
        """True if the token of that id has not been revoked and has not expired."""
        return not key or any(row.id == key for row in self._good_rows())

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
