"""An authenticator for Djinn: clients show `TENANT.SIGNATURE`, signed with a secret that the servers share."""

from __future__ import annotations

import hashlib
import hmac

import attrs

from djinn.hooks import Authenticator, ConfigurationError, Credentials, Denial, Identity, hookimpl

djinn_api_version = "2.0"


@attrs.frozen
class Settings:
    """Settings of the plugin, as in `[plugins.example]` or DJINN_PLUGIN_EXAMPLE_SECRET."""

    secret: str = attrs.field(default="", repr=False)


djinn_settings = Settings


class ExampleAuthenticator:
    """Used where `djinn serve --authenticator example` names it."""

    name = "example"

    def __init__(self, settings: Settings) -> None:
        self._secret = settings.secret.encode()

    def token(self, tenant: str) -> str:
        """Token that clients of a tenant show."""
        return f"{tenant}.{hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()}"

    def prepare(self) -> None:
        """Called when the server starts."""
        if len(self._secret) < 16:
            raise ConfigurationError("its setting `secret` must have 16 characters or more")

    def authenticate(self, credentials: Credentials) -> Identity | Denial | None:
        """The tenant; a refusal, which repeats nothing of what was shown; None for what looks different."""
        tenant, dot, _ = credentials.token.rpartition(".")
        if not dot or not tenant.isidentifier() or not tenant.isascii() or tenant == "default":
            return None
        if not hmac.compare_digest(credentials.token.encode(), self.token(tenant).encode()):
            return Denial("the signature of the token is wrong: ask for a new one", "signature")
        return Identity(tenant, key=self._key)

    def is_valid(self, key: str) -> bool:
        """True while sessions with this key may go on: until the secret is another one."""
        return key == self._key

    @property
    def _key(self) -> str:
        """Id of the secret for the audit log, which tells nothing of it."""
        return hashlib.sha256(b"key " + self._secret).hexdigest()[:16]


@hookimpl
def djinn_register_authenticators(settings: Settings) -> list[Authenticator]:
    """The authenticators that this plugin offers."""
    return [ExampleAuthenticator(settings)]
