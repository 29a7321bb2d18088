"""`djinn_register_authenticators`: who a client is, by what it shows to a gateway."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Final

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.quotas import Quota

OPERATOR: Final = "default"  # tenant of the server's operator, and of all clients if there are no other tenants


@attrs.frozen
class Credentials:
    """Credentials that a client showed, none of which may be logged.

    Attributes:
        token: the token of its first message, or of the HTTP header `Authorization: Bearer`; empty if it showed none.
        certificate: its TLS certificate (DER), signed by the authority of `--tls-client-ca`; empty if it showed none.
        peer: its address, as far as the transport knows it.
    """

    token: str = attrs.field(default="", repr=False)
    certificate: bytes = attrs.field(default=b"", repr=False)
    peer: str = ""


@attrs.frozen
class Identity:
    """The identity of a client whose credentials are good.

    Attributes:
        tenant: name of the tenant that the client works for: letters, digits, dots, dashes and underscores, at most 64,
            beginning with a letter or digit. `default` is the operator, who sees all tenants.
        key: id of the credentials, which is logged and is no secret; at most 64 printable characters. Sessions end when
            `Authenticator.is_valid` denies it; empty: they do not.
        monitor: True for a client that may look at the server, and do nothing else.
        quota: limits of what the tenant may use. Where there are none, those that `djinn token limit` sets hold.
    """

    tenant: str
    key: str = ""
    monitor: bool = False
    quota: Quota = attrs.field(factory=Quota)

    @property
    def sees_all(self) -> bool:
        """True for an identity that may see what other tenants do: the operator, and one that is a monitor."""
        return self.tenant == OPERATOR or self.monitor


@attrs.frozen
class Denial:
    """A refusal of a client.

    Attributes:
        reason: text for the client. It must not contain the client's credentials.
        kind: name in the audit log and metrics: lower-case letters and underscores, at most 32.
        again: True if the same credentials may soon be valid, so that clients retry.
        after: seconds before a retry.
    """

    reason: str
    kind: str = "credentials"
    again: bool = False
    after: float = 0.0


class Authenticator(ABC):
    """Identify clients for a gateway, if the setting `authenticators` names the authenticator.

    It fails closed. An exception or an invalid result refuses the client. An exception in `is_valid` ends the sessions
    of the key. The log names the plugin, but omits the exception's message, which may contain a secret.

    Attributes:
        name: unique among authenticators, as settings name it.
    """

    name: str

    def prepare(self) -> None:  # noqa: B027 - some need no preparation
        """Get ready, when a gateway starts that uses this authenticator: read keys, check settings. By default nothing.

        Raises:
            ConfigurationError: it cannot be used as it is set up. The server does not start.
        """

    @abstractmethod
    def authenticate(self, credentials: Credentials) -> Identity | Denial | None:
        """The client's identity, or why it is refused; None if the credentials are none of this authenticator's kind.

        Called once a connection, in threads, several at the same time; the client has waited that long.
        """

    def is_valid(self, key: str) -> bool:
        """True while sessions may go on that began with the credentials of this key. By default False.

        An authenticator that gives keys to clients has this method; one whose identities have no key needs none. Asked every few
        seconds for each key that is in use, also for keys that an earlier server process gave out. It answers from
        memory: one that waits keeps other sessions from being ended.
        """
        del key
        return False


@hookspec
def djinn_register_authenticators(settings: Any) -> Iterable[Authenticator]:
    """Return the authenticators that this plugin offers.

    Called once in each gateway process. The setting `authenticators` (`djinn serve --authenticator`) names those that are
    used, none by default, in the order in which they are asked; the server's own tokens are looked at first. The first
    result that is not None counts. One that raises refuses the client.
    """
    del settings
    raise NotImplementedError
