"""Verification of JSON Web Tokens: signature, audience, issuer, times, and the tenant."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import Any, Final

import attrs

from djinn.errors import ConfigurationError
from djinn.hooks import Authenticator, Credentials, Denial, Identity
from djinn_jwt.key_set import KeySet, VerifyingKey

_ASYMMETRIC: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OPERATOR: Final = "default"  # the operator's tenant name, which tokens must not claim


def _check_algorithms(instance: object, attribute: object, value: tuple[str, ...]) -> None:
    del instance, attribute
    if not value or not set(value) <= set(_ASYMMETRIC):
        raise ValueError(f"must be one or more of {', '.join(_ASYMMETRIC)}")


@attrs.frozen
class Settings:
    """Settings of the plugin.

    Attributes:
        keys: file with the issuer's public keys (JWKS).
        audience: accepted values of the claim `aud`. A token must have at least one of them.
        issuer: required value of the claim `iss`. If it is empty, every issuer with a key in the file is accepted.
        tenant_claim: name of the claim with the tenant's name.
        algorithms: accepted signature algorithms.
        leeway: allowed difference between the issuer's clock and the server's, in seconds.
    """

    keys: Path | None = None
    audience: tuple[str, ...] = ()
    issuer: str = ""
    tenant_claim: str = "tenant"
    algorithms: tuple[str, ...] = attrs.field(default=("RS256", "ES256", "EdDSA"), validator=_check_algorithms)
    leeway: float = attrs.field(default=30.0, validator=attrs.validators.ge(0))


class JwtAuthenticator(Authenticator):
    """Authenticator that accepts unexpired tokens that a key of the key set signed for the configured audience."""

    name = "jwt"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys: KeySet | None = None

    def prepare(self) -> None:
        """Read the keys.

        Raises:
            ConfigurationError: `keys` or `audience` is not set, the key set is invalid, or PyJWT is missing.
        """
        if self._settings.keys is None:
            raise ConfigurationError("set `plugins.jwt.keys` to a file with the issuer's public keys (JWKS)")
        if not self._settings.audience:
            raise ConfigurationError(
                "set `plugins.jwt.audience` to the `aud` claim of your tokens, for example `djinn`"
            )
        try:
            import jwt  # noqa: F401 - check that it is installed
        except ImportError as error:
            raise ConfigurationError(
                f"the authenticator jwt needs PyJWT, which cannot be imported ({error}): run `pip install 'pyjwt[crypto]'`"
            ) from error
        self._keys = KeySet(self._settings.keys)

    def authenticate(self, credentials: Credentials) -> Identity | Denial | None:
        """Return the token's tenant, or a denial with the reason. Return None if the token is not a JSON Web Token."""
        token = credentials.token
        if not token.startswith("eyJ") or token.count(".") != 2 or not token.isascii():
            return None
        return self._verify(token)

    def is_valid(self, key: str) -> bool:
        """Return True until the token expires or its signing key leaves the key set. `key`: key of an `Identity`."""
        _, _, expiry_and_signer = key.partition(".")
        expires, _, signer = expiry_and_signer.partition(".")
        if self._keys is None or not expires.isascii() or not expires.isdigit() or len(expires) > 12:
            return False
        key_names = {_short(verifying_key.name) for verifying_key in self._keys.current()}
        return time.time() < int(expires) + self._settings.leeway and signer in key_names

    def _verify(self, token: str) -> Identity | Denial:
        import jwt

        try:
            header: dict[str, Any] = jwt.get_unverified_header(token)
            key = self._signer(header)
            if key is None:
                return Denial(
                    "the server does not know the key that signed this token: ask its operator to add the issuer's key",
                    "unknown_key",
                )
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=list(self._settings.algorithms),
                audience=list(self._settings.audience),
                issuer=self._settings.issuer or None,
                leeway=self._settings.leeway,
                options={"require": ["exp", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            return Denial("this token has expired: ask for a new one", "expired")
        except jwt.ImmatureSignatureError:
            return Denial("this token is not valid yet: compare the clocks of its issuer and of the server", "not_yet")
        except jwt.InvalidAudienceError:
            return Denial("this token is for another service: ask for a token for this server", "audience")
        except jwt.InvalidIssuerError:
            return Denial(
                "the server does not trust the issuer of this token: ask for a token of another issuer", "issuer"
            )
        except jwt.MissingRequiredClaimError as error:
            return Denial(f"this token lacks the claim {error.claim!r}: ask its issuer for the claim", "claims")
        except jwt.PyJWTError:
            return Denial("the signature of this token is not valid: ask its issuer for a new token", "signature")
        return self._identity(token, key, claims)

    def _signer(self, header: dict[str, Any]) -> VerifyingKey | None:
        """Return the key that the header of a token names, or the only key if it names none. Return None if no key fits."""
        assert self._keys is not None, "the authenticator was not prepared"
        keys = self._keys.current()
        if "kid" in header:
            return next((key for key in keys if key.name == header["kid"]), None)
        return keys[0] if len(keys) == 1 else None

    def _identity(self, token: str, key: VerifyingKey, claims: dict[str, Any]) -> Identity | Denial:
        tenant = claims.get(self._settings.tenant_claim)
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant) or tenant == _OPERATOR:
            reason = "this token has no valid tenant name: ask its issuer for the claim "
            return Denial(f"{reason}{self._settings.tenant_claim!r}", "tenant")
        return Identity(tenant, f"{_short(token)}.{int(claims['exp'])}.{_short(key.name)}")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
