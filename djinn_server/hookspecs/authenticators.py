"""`djinn_register_authenticators`: identify a client by the credentials that it shows to a gateway."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Final

import attrs

from djinn_core.hookspecs import hookspec
from djinn_server.hookspecs.quotas import Quota

OPERATOR: Final = "default"  # tenant of the server's operator; also of all clients if no tenants are configured


@attrs.frozen
class Credentials:
    """Credentials that a client showed. None of them may be logged.

    Attributes:
        token: token in the first message, or in the HTTP header `Authorization: Bearer`; empty without a token.
        certificate: TLS certificate (DER) that the authority of `--tls-client-ca` signed; empty without a certificate.
        peer: address of the client; empty if the transport does not know the address.
    """

    token: str = attrs.field(default="", repr=False)
    certificate: bytes = attrs.field(default=b"", repr=False)
    peer: str = ""


@attrs.frozen
class Identity:
    """The identity of a client with valid credentials.

    Attributes:
        tenant: name of the tenant that the client works for: letters, digits, dots, dashes and underscores, at most 64, beginning
            with a letter or digit. `default` is the operator, who sees all tenants.
        key: id of the credentials, which is logged and is no secret; at most 64 printable characters. Sessions end when
            `Authenticator.is_valid` returns False for the key. If empty, sessions do not end that way.
        monitor: True for a client that may only read the server's state.
        quota: limits for the tenant. The default `Quota()` stands for the limits that `djinn token limit` sets.
    """

    tenant: str
    key: str = ""
    monitor: bool = False
    quota: Quota = attrs.field(factory=Quota)

    @property
    def sees_all(self) -> bool:
        """Return True if the identity may see other tenants: the operator and monitors."""
        return self.tenant == OPERATOR or self.monitor


@attrs.frozen
class Denial:
    """A refusal of a client.

    Attributes:
        reason: text for the client. It must not contain the client's credentials.
        kind: name in the audit log and metrics: lower-case letters and underscores, at most 32.
        retry: True if the same credentials may soon become valid. Clients then retry.
        retry_after: seconds before a retry.
    """

    reason: str
    kind: str = "credentials"
    retry: bool = False
    retry_after: float = 0.0


class Authenticator(ABC):
    """Identify clients for a gateway, if the setting `authenticators` names the authenticator.

    An exception or an invalid result refuses the client. An exception in `is_valid` ends the sessions
    of the key. The log names the plugin, but omits the exception's message, which may contain a secret.

    Attributes:
        name: unique among authenticators, as settings name it.
    """

    name: str

    def prepare(self) -> None:  # noqa: B027 - some need no preparation
        """Prepare when a gateway that uses this authenticator starts: read keys, check settings.

        The default does nothing.

        Raises:
            ConfigurationError: the configuration is invalid. The server does not start.
        """

    @abstractmethod
    def authenticate(self, credentials: Credentials) -> Identity | Denial | None:
        """Return the client's identity or a denial, or None if the credentials are for another authenticator.

        Called once per connection while the client waits, in several threads at the same time.
        """

    def is_valid(self, key: str) -> bool:
        """Return True while sessions that began with the credentials of this key may continue. The default is False.

        An authenticator whose identities have keys implements this method. The gateway calls it every few seconds for each key in
        use, including keys that an earlier server process issued. Answer from memory: a slow answer delays the end of other
        sessions.
        """
        del key
        return False


@hookspec
def djinn_register_authenticators(settings: Any) -> Iterable[Authenticator]:
    """Return the authenticators that this plugin offers.

    Called once in each gateway process. The setting `authenticators` (`djinn serve --authenticator`) lists the authenticators in
    use, in the order in which they are called; none by default. The gateway checks the server's own tokens first. The first result
    other than None counts. An exception refuses the client.
    """
    del settings
    raise NotImplementedError
