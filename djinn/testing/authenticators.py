"""Conformance suite for authenticators."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import pytest

from djinn.testing.suite import Ending, missing, outcome, require_protocol, start
from djinn_server.hookspecs.authenticators import Authenticator, Credentials, Denial, Identity
from djinn_server.launch.token_table import check_tenant

_BEFORE = "; prepare it in the fixture, as a server does when it starts"


class AuthenticatorConformance(Ending):
    """Tests that every authenticator must pass.

    Subclass this class and define the fixture `authenticator`. The fixture must have called `prepare`. If some
    credentials are valid, also define the fixture `accepted`.
    """

    @pytest.fixture
    def authenticator(self) -> Authenticator:
        """Return the authenticator under test, after a call of `prepare`."""
        return missing(self, "authenticator", f"your authenticator{_BEFORE}")  # type: ignore[return-value]

    @pytest.fixture
    def accepted(self) -> Mapping[str, Credentials]:
        """Return valid credentials by name. Override this fixture if some credentials are valid."""
        return {}

    @pytest.fixture
    def wrong(self) -> Mapping[str, Credentials]:
        """Return invalid credentials by name.

        Override this fixture to add your own to `djinn.testing.wrong_credentials()`.
        """
        return wrong_credentials()

    def test_authenticator_has_every_member(self, authenticator: Authenticator) -> None:
        """The authenticator has all attributes and methods of `Authenticator`, and a valid name."""
        require_protocol(authenticator, "authenticators")
        assert re.fullmatch(r"[A-Za-z0-9_-]+", authenticator.name), (
            f"name {authenticator.name!r}: use only letters, digits, - and _"
        )
        assert authenticator.name != "tokens", "the built-in authenticator has the name `tokens`"

    def test_invalid_credentials_are_refused(
        self, authenticator: Authenticator, wrong: Mapping[str, Credentials]
    ) -> None:
        """`authenticate` returns a denial or None for invalid credentials.

        The reason repeats no part of the credentials.
        """
        for name, credentials in wrong.items():
            result = authenticator.authenticate(credentials)
            assert result is None or isinstance(result, Denial), f"{name}: {result!r}, but must be a Denial or None"
            if isinstance(result, Denial):
                assert result.reason, f"{name}: the denial has no reason"
                assert re.fullmatch("[a-z][a-z_]{0,31}", result.kind), f"{name}: kind {result.kind!r}: use a-z and _"
                for part in _parts(credentials):
                    assert part not in result.reason, f"{name}: the reason contains a part of the credentials"

    def test_valid_credentials_are_accepted(
        self, authenticator: Authenticator, accepted: Mapping[str, Credentials]
    ) -> None:
        """`authenticate` returns a valid tenant for valid credentials.

        The key of the credentials is valid, constant and not secret.
        """
        for name, credentials in accepted.items():
            result = authenticator.authenticate(credentials)
            assert isinstance(result, Identity), f"{name}: {result!r}, but must be an Identity"
            assert check_tenant(result.tenant) == result.tenant
            assert re.fullmatch(r"[\x21-\x7e]{0,64}", result.key), (
                f"{name}: `key` has over 64 or unprintable characters"
            )
            assert not any(part in result.key for part in _parts(credentials)), (
                f"{name}: `key` is logged, but contains a part of the credentials"
            )
            assert not result.key or authenticator.is_valid(result.key) is True, f"{name}: `is_valid` refuses `key`"
            assert authenticator.authenticate(credentials) == result, f"{name}: two calls returned different results"

    def test_unknown_keys_are_invalid(self, authenticator: Authenticator) -> None:
        """`is_valid` returns False for a key that the authenticator never gave to a client."""
        for key in ("", "?", secrets.token_hex(8), "a.b.c", "x" * 64):
            assert authenticator.is_valid(key) is False, f"`is_valid` accepts the unknown key {key!r}"

    def test_threads_may_call_it_concurrently(self, authenticator: Authenticator) -> None:
        """Several threads can call `authenticate` at the same time, because each connection has its own thread."""
        credentials = Credentials(secrets.token_urlsafe(64), peer="127.0.0.1:1")
        for call in [start(authenticator.authenticate, credentials) for _ in range(50)]:
            outcome(call, "`authenticate` must not wait for another thread")


def wrong_credentials() -> dict[str, Credentials]:
    """Return credentials that no authenticator should accept, by the name of their fault."""
    unsigned = "eyJhbGciOiJub25lIn0.eyJ0ZW5hbnQiOiJhbGljZSIsImV4cCI6OTk5OTk5OTk5OX0."
    tokens = {
        "nothing": "",
        "a space": " ",
        "one character": "x",
        "a random token": secrets.token_urlsafe(32),
        "a long one": "x" * 8192,
        "what is not ASCII": "t\u00f6ken \U0001f511",
        "control characters": "a\x00b\nc",
        "dots": "...",
        "a token without a signature": unsigned,
        "a token with another signature": unsigned + secrets.token_urlsafe(32),
    }
    wrong = {name: Credentials(token, peer="127.0.0.1:1") for name, token in tokens.items()}
    return wrong | {"bytes that are no certificate": Credentials(certificate=b"\x30\x03\x02\x01\x00")}


def _parts(credentials: Credentials) -> list[str]:
    """Return the parts of a token that must stay secret: the long parts between dots."""
    return [part for part in credentials.token.split(".") if len(part) >= 16]
