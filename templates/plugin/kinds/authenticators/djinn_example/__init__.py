"""An authenticator for Djinn: clients show tokens, of which the settings of the server have the digests."""

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
    """Used where `djinn serve --authenticator example` names it."""

    name = "example"

    def __init__(self, settings: Settings) -> None:
        self._tenants = {digest: tenant for tenant, _, digest in (one.partition("=") for one in settings.digests)}

    def authenticate(self, credentials: Credentials) -> Identity | None:
        """The tenant of the token; None for one that is not known."""
        digest = hashlib.sha256(credentials.token.encode()).hexdigest()
        return Identity(self._tenants[digest], key=digest[:16]) if digest in self._tenants else None

    def is_valid(self, key: str) -> bool:
        """True while the settings have the digest: a server that starts without it ends the sessions that go on."""
        return key in {digest[:16] for digest in self._tenants}


@hookimpl
def djinn_register_authenticators(settings: Settings) -> list[Authenticator]:
    """The authenticators that this plugin offers."""
    return [ExampleAuthenticator(settings)]
