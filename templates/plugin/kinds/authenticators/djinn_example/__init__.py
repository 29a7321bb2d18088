"""An authenticator for Djinn: check tokens by the digests in the server's settings."""

import hashlib

import attrs

from djinn.hooks import Authenticator, Credentials, Identity, hookimpl

djinn_api_version = "2.0"


@attrs.frozen
class Settings:
    """Settings of the plugin, as in `[plugins.example]` or DJINN_PLUGIN_EXAMPLE_DIGESTS."""

    digests: tuple[str, ...] = ()  # `TENANT=DIGEST`: hexadecimal SHA-256 of a token, which should be 32 random bytes


djinn_settings = Settings


class ExampleAuthenticator(Authenticator):
    """Used if `djinn serve --authenticator example` names it."""

    name = "example"

    def __init__(self, settings: Settings) -> None:
        self._tenants = {digest: tenant for tenant, _, digest in (one.partition("=") for one in settings.digests)}

    def authenticate(self, credentials: Credentials) -> Identity | None:
        """Return the tenant of a token, or None for an unknown token."""
        digest = hashlib.sha256(credentials.token.encode()).hexdigest()
        return Identity(self._tenants[digest], key=digest[:16]) if digest in self._tenants else None

    def is_valid(self, key: str) -> bool:
        """Return True while the settings have the digest of the token. The server ends sessions of invalid tokens."""
        return key in {digest[:16] for digest in self._tenants}


@hookimpl
def djinn_register_authenticators(settings: Settings) -> list[Authenticator]:
    """Return the authenticators of this plugin."""
    return [ExampleAuthenticator(settings)]
