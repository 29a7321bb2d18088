"""The authenticator `jwt`: verifies signed tokens with the issuer's keys and reads the tenant from a claim."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Authenticator, hookimpl
from djinn_jwt.authenticator import JwtAuthenticator, Settings

__all__ = [
    "JwtAuthenticator",
    "Settings",
    "djinn_api_version",
    "djinn_register_authenticators",
    "djinn_settings",
]

djinn_api_version = "2.0"
djinn_settings = Settings


@hookimpl
def djinn_register_authenticators(settings: Settings) -> Iterable[Authenticator]:
    """Return the authenticator `jwt`."""
    return [JwtAuthenticator(settings)]
