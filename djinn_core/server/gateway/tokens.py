"""The gateway's own token, and the check whether it allows listening on a network."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.launch.addresses import is_loopback
from djinn_core.launch.token_table import is_table, read_private

VARIABLE = "DJINN_TOKEN"
GENERATED = "generated for this server"
SHORTEST = 16  # characters; what people type and what can be tried out is shorter


@attrs.frozen
class Token:
    """A token and its origin: `GENERATED`, or the file or variable in which the operator supplied it."""

    value: str = attrs.field(repr=False)
    origin: str

    @property
    def supplied(self) -> bool:
        """True if the operator supplied the token."""
        return self.origin != GENERATED

    def matches(self, given: str) -> bool:
        """Compare `given` with the token in constant time."""
        return hmac.compare_digest(self.value.encode(), given.encode())


def find_token(file: Path | None, environ: Mapping[str, str]) -> Token:
    """The token from `file`, or from the environment, or a new one.

    Raises:
        ConfigurationError: the file cannot be read, others may read it, or the token is too short to protect anything.
    """
    if file is not None:
        try:
            return _checked(read_private(file).decode("utf-8").strip(), f"from the file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the token file {file}: {error}") from error
    if environ.get(VARIABLE):
        return _checked(environ[VARIABLE], f"from the environment, {VARIABLE}")
    return Token(secrets.token_urlsafe(32), GENERATED)


def has_table(file: Path) -> bool:
    """Check whether the file has a table of tokens, rather than one token as text.

    Raises:
        ConfigurationError: it cannot be read, or others may read it.
    """
    try:
        return is_table(read_private(file))
    except OSError as error:
        raise ConfigurationError(f"cannot read the token file {file}: {error}") from error


def _checked(value: str, origin: str) -> Token:
    if len(value) < SHORTEST:
        raise ConfigurationError(
            f"the token ({origin}) has {len(value)} characters and must have {SHORTEST} or more. A good one: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))' > TOKEN_FILE && chmod 600 TOKEN_FILE"
        )
    return Token(value, origin)


def check_exposure(host: str, supplied: bool, protected: bool) -> None:
    """Refuse to be reachable from other machines unless the operator took care of it.

    Args:
        host: where to listen.
        supplied: whether the operator chose the token, or made a table of them.
        protected: whether there is TLS, or the operator accepts that everything travels unencrypted.

    Raises:
        ConfigurationError: `host` is not a loopback address, and the token was not supplied or nothing is protected. The
            message says what to do.
    """
    if is_loopback(host):
        return
    lacking = []
    if not supplied:
        lacking.append(
            "a token of your own: `djinn token create TENANT` and --token-file FILE, or the variable DJINN_TOKEN"
        )
    if not protected:
        lacking.append(
            "encryption: --tls-cert FILE and --tls-key FILE, or --tls-self-signed; or keep --host 127.0.0.1 and let clients "
            "come through `ssh -L 5556:127.0.0.1:5556 SERVER`; or, on a network that no other party can read, add "
            "--insecure-plaintext-on-network"
        )
    if lacking:
        raise ConfigurationError(
            f"djinn serve does not listen on {host}, which other machines can reach, without "
            + " and without ".join(lacking)
        )
