"""Authentication by token: the server's own token, and a token table that may change while the server runs."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import is_loopback
from djinn_core.system.shared_files import FileVersion, version_of
from djinn_server.hookspecs.authenticators import OPERATOR, Authenticator, Credentials, Denial, Identity
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.server_state import stored_token
from djinn_server.launch.token_table import TokenRow, TokenTable, digest_of, is_table, read_private, read_table

VARIABLE = "DJINN_TOKEN"
GENERATED = "generated for this server"
SHORTEST = 16  # minimum characters of a token; guessable tokens are shorter


@attrs.frozen
class Token:
    """A token and its origin: `GENERATED`, or the file or variable from which the operator supplied it."""

    value: str = attrs.field(repr=False)
    origin: str

    @property
    def supplied(self) -> bool:
        """True if the operator supplied the token."""
        return self.origin != GENERATED

    def matches(self, text: str) -> bool:
        """Return True if `text` is the token. The comparison takes constant time."""
        return hmac.compare_digest(self.value.encode(), text.encode())


def find_token(file: Path | None, environ: Mapping[str, str], state: Path | None = None) -> Token:
    """Return the token in `file`, `environ` or the folder `state`. Otherwise generate one, and store it in `state`.

    Raises:
        ConfigurationError: the file cannot be read, other users may read it, or the token is too short.
    """
    if file is not None:
        try:
            return _long_enough(read_private(file).decode("utf-8").strip(), f"from the file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the token file {file}: {error}") from error
    if environ.get(VARIABLE):
        return _long_enough(environ[VARIABLE], f"from the environment, {VARIABLE}")
    if state is None:
        return Token(secrets.token_urlsafe(32), GENERATED)
    return attrs.evolve(_long_enough(stored_token(state), f"from the state folder {state}"), origin=GENERATED)


def has_table(file: Path) -> bool:
    """Return True if the file has a token table, False if it has one token as text.

    Raises:
        ConfigurationError: the file cannot be read, or other users may read it.
    """
    try:
        return is_table(read_private(file))
    except OSError as error:
        raise ConfigurationError(f"cannot read the token file {file}: {error}") from error


def _long_enough(value: str, origin: str) -> Token:
    if len(value) < SHORTEST:
        raise ConfigurationError(
            f"the token ({origin}) has {len(value)} characters and must have {SHORTEST} or more. Generate one: "
            "(umask 077; python -c 'import secrets; print(secrets.token_urlsafe(32))' > TOKEN_FILE)"
        )
    return Token(value, origin)


def check_exposure(host: str, supplied: bool, protected: bool) -> None:
    """Check that other machines can reach the server only with the operator's token and protected traffic.

    Args:
        host: address to listen at.
        supplied: True if the operator supplied the token or a token table.
        protected: True if there is TLS, or if the operator accepts unencrypted traffic.

    Raises:
        ConfigurationError: `host` is not a loopback address, and `supplied` or `protected` is False. The message has a remedy.
    """
    if is_loopback(host):
        return
    missing = []
    if not supplied:
        missing.append(
            "a token of your own: `djinn token create TENANT` and --token-file FILE, or the variable DJINN_TOKEN"
        )
    if not protected:
        missing.append(
            "encryption: --tls-cert FILE and --tls-key FILE, or --tls-self-signed; or keep --host 127.0.0.1 and let clients "
            "connect through `ssh -L 5556:127.0.0.1:5556 SERVER`; or, on a network that no other party can read, add "
            "--insecure-plaintext-on-network"
        )
    if missing:
        raise ConfigurationError(
            f"djinn serve does not listen on {host}, which other machines can reach, without "
            + " and without ".join(missing)
        )


_log = get_logger("djinn.server")


class TokenAuthenticator(Authenticator):
    """The built-in authenticator, which identifies clients by tokens."""

    name = "tokens"

    def __init__(self, token: Token, table: Path | None = None) -> None:
        """`table`: file with a token table, or None. Raises `ConfigurationError` if the table is not usable."""
        self._token = token
        self._file = table
        self._lock = threading.Lock()
        self._table = TokenTable()
        self._version: FileVersion | None = None
        self._last_error = ""
        if table is not None:
            self._table = read_table(table)
            self._version = version_of(table)

    @property
    def has_table(self) -> bool:
        """True if the server has a token table besides its own token."""
        return self._file is not None

    @property
    def tenants(self) -> frozenset[str]:
        """The operator, and each tenant with a valid token. Tokens of monitors do not count."""
        return frozenset({OPERATOR, *(row.tenant for row in self._valid_rows() if not row.monitor)})

    def quota_of(self, tenant: str) -> Quota:
        """Return the quota of a tenant in the token table."""
        return self._current().quotas.get(tenant, Quota())

    def authenticate(self, credentials: Credentials) -> Identity | Denial | None:
        """Authenticate a token, as `Authenticator.authenticate` does. The duration reveals no other tokens."""
        if self._token.matches(credentials.token):
            return Identity(OPERATOR, quota=self.quota_of(OPERATOR))
        digest, match = digest_of(credentials.token), None
        table = self._current()
        for row in table.tokens:
            if hmac.compare_digest(row.digest, digest):
                match = row
        if match is None:
            return None
        if match.expired(time.time()):
            return Denial("this token has expired: ask the server's operator for a new one", "expired")
        return Identity(match.tenant, match.id, match.monitor, table.quotas.get(match.tenant, Quota()))

    def is_valid(self, key: str) -> bool:
        """Return True if the token with this id is neither revoked nor expired, or if the id is empty."""
        return not key or any(row.id == key for row in self._valid_rows())

    def _valid_rows(self) -> list[TokenRow]:
        now = time.time()
        return [row for row in self._current().tokens if not row.expired(now)]

    def _current(self) -> TokenTable:
        """Return the token table in the file. If the file has become unreadable, return the last table."""
        if self._file is None:
            return self._table
        with self._lock:
            try:
                version = version_of(self._file)
                if version != self._version:
                    self._table, self._version, self._last_error = read_table(self._file), version, ""
                    _log.info("the token table has changed and was read", rows=len(self._table.tokens))
            except (OSError, ConfigurationError) as error:
                if str(error) != self._last_error:  # logged once, not for every connection
                    _log.error("cannot read the token table: the last table remains valid", error=str(error))
                self._last_error = str(error)
            return self._table
