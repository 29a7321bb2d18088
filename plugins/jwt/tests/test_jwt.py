"""Signed tokens at a `djinn serve` in a separate process, and the authenticator alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

import attrs
import pytest
import torch
from configured import configured
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from servers import SECONDS, start_server, wait_for

import djinn_jwt
from djinn.errors import AccessRefused, ConfigurationError, SessionLost
from djinn.hooks import Credentials, Identity
from djinn.testing import AuthenticatorConformance, PluginConformance, wrong_credentials
from djinn_jwt import JwtAuthenticator, Settings
from djinn_jwt import authenticator as module

jwt = pytest.importorskip("jwt", reason="PyJWT is not installed")

ISSUER = "https://login.example.org"
DEVICE = "remote_accelerator:0"


@attrs.frozen
class Signer:
    """A private key of a token issuer."""

    name: str
    private: object
    algorithm: str = "RS256"

    @property
    def public(self):
        """Return the public key as an entry of a key set."""
        kind = jwt.algorithms.RSAAlgorithm if self.algorithm == "RS256" else jwt.algorithms.ECAlgorithm
        found = kind.to_jwk(self.private.public_key(), as_dict=True)
        return found | {"kid": self.name, "use": "sig", "alg": self.algorithm}

    def token(self, drop=(), header=None, **claims):
        """Return a token for alice, with changed claims."""
        given = {"iss": ISSUER, "aud": "djinn", "exp": int(time.time()) + 3600, "tenant": "alice"} | claims
        kept = {name: value for name, value in given.items() if name not in drop}
        return jwt.encode(kept, self.private, self.algorithm, headers=header or {"kid": self.name})


FIRST = Signer("first", rsa.generate_private_key(65537, 2048))
SECOND = Signer("second", ec.generate_private_key(ec.SECP256R1()), "ES256")
STRANGE = Signer("first", rsa.generate_private_key(65537, 2048))
UNKNOWN = Signer("unknown", STRANGE.private)


def write_keys(path, *signers):
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"keys": [signer.public for signer in signers]}))
    new.replace(path)
    return path


def encode_part(part):
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def unsigned():
    _, claims, _ = FIRST.token().split(".")
    return f"{encode_part({'alg': 'none', 'kid': 'first'})}.{claims}."


def signed_with_the_public_key():
    """Return an HS256 token whose secret is the public key. A verifier that accepts any algorithm would accept it."""
    public = FIRST.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    head = f"{encode_part({'alg': 'HS256', 'kid': 'first'})}.{FIRST.token().split('.')[1]}"
    signature = base64.urlsafe_b64encode(hmac.digest(public, head.encode(), hashlib.sha256)).rstrip(b"=").decode()
    return f"{head}.{signature}"


def tampered_token():
    """Return a valid token with a changed tenant, so that the signature is invalid."""
    head, _, signature = FIRST.token().split(".")
    claims = {"iss": ISSUER, "aud": "djinn", "exp": int(time.time()) + 3600, "tenant": "bob"}
    return f"{head}.{encode_part(claims)}.{signature}"


WRONG = {
    "expired": (lambda: FIRST.token(exp=int(time.time()) - 3600), "this token has expired"),
    "not yet": (lambda: FIRST.token(nbf=int(time.time()) + 3600), "not valid yet"),
    "another audience": (lambda: FIRST.token(aud="mail"), "for another service"),
    "another issuer": (lambda: FIRST.token(iss="https://evil.example"), "does not trust the issuer of this token"),
    "no expiry": (lambda: FIRST.token(drop=["exp"]), "lacks the claim 'exp'"),
    "no audience": (lambda: FIRST.token(drop=["aud"]), "lacks the claim 'aud'"),
    "no tenant": (lambda: FIRST.token(drop=["tenant"]), "has no valid tenant name"),
    "the operator": (lambda: FIRST.token(tenant="default"), "has no valid tenant name"),
    "a path": (lambda: FIRST.token(tenant="../alice"), "has no valid tenant name"),
    "a number": (lambda: FIRST.token(tenant=7), "has no valid tenant name"),
    "an unknown key": (UNKNOWN.token, "does not know the key that signed this token"),
    "another key of the same name": (STRANGE.token, "signature of this token is not valid"),
    "no key's name": (lambda: FIRST.token(header={"kid": ""}), "does not know the key that signed this token"),
    "without a signature": (unsigned, "signature of this token is not valid"),
    "a symmetric signature": (signed_with_the_public_key, "signature of this token is not valid"),
    "changed": (tampered_token, "signature of this token is not valid"),
}


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path / "jwks.json", FIRST, SECOND)


@pytest.fixture
def prepared_authenticator(keys):
    made = JwtAuthenticator(Settings(keys, ("djinn",), ISSUER))
    made.prepare()
    return made


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_jwt


class TestAuthenticator(AuthenticatorConformance):
    @pytest.fixture
    def authenticator(self, prepared_authenticator):
        return prepared_authenticator

    @pytest.fixture
    def accepted(self):
        tokens = {"RSA": FIRST.token(), "elliptic curve": SECOND.token(), "several": FIRST.token(aud=["mail", "djinn"])}
        return {name: Credentials(token) for name, token in tokens.items()}

    @pytest.fixture
    def wrong(self):
        return wrong_credentials() | {name: Credentials(make()) for name, (make, _) in WRONG.items()}


# --- over a server --------------------------------------------------------------------------------------------------------


@attrs.frozen
class GuardedServer:
    """A server that requires tokens of an issuer."""

    server: object
    folder: object

    @property
    def keys(self):
        return self.folder / "jwks.json"

    @property
    def audit(self):
        return [json.loads(line) for line in (self.folder / "audit").read_text().splitlines()]


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory, python, plain_environment):
    folder = tmp_path_factory.mktemp("jwt")
    write_keys(folder / "jwks.json", FIRST)
    environment = plain_environment | {
        "DJINN_PLUGIN_JWT_KEYS": str(folder / "jwks.json"),
        "DJINN_PLUGIN_JWT_AUDIENCE": "djinn",
        "DJINN_PLUGIN_JWT_ISSUER": ISSUER,
    }
    options = (
        "--authenticator",
        "jwt",
        "--audit-log",
        str(folder / "audit"),
        "--store-gib",
        "0",
        "--drain-seconds",
        "1",
    )
    server = start_server(python.start, folder, *options, env=environment)
    yield GuardedServer(server, folder)
    assert server.stop() == 0, server.log.read_text()


def test_program_runs_with_signed_token(guarded_server):
    token = FIRST.token()
    with configured(servers=(guarded_server.server.url("tcp"),), token=token):
        assert torch.ones(3, device=DEVICE).sum().item() == 3.0
    (admitted, *_) = [line for line in guarded_server.audit if line["audit"] == "admitted"]
    assert admitted["tenant"] == "alice"
    assert admitted["key"].startswith("jwt:")
    with configured(connection_file=guarded_server.server.file):
        assert torch.ones(3, device=DEVICE).sum().item() == 3.0
    assert [line["tenant"] for line in guarded_server.audit if line["audit"] == "admitted"][-1] == "default"
    for text in (guarded_server.server.log.read_text(), (guarded_server.folder / "audit").read_text()):
        assert not [part for part in token.split(".") if part in text]


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tokens_are_refused_with_the_reason(guarded_server, what):
    make, reason = WRONG[what]
    token = make()
    with (
        configured(servers=(guarded_server.server.url("tcp"),), token=token, connect_timeout=SECONDS),
        pytest.raises(AccessRefused, match=reason) as caught,
    ):
        torch.ones(3, device=DEVICE)
    for part in token.split("."):
        assert len(part) < 20 or part not in str(caught.value) + guarded_server.server.log.read_text()


def test_keys_are_rotated_at_runtime(guarded_server):
    with configured(servers=(guarded_server.server.url("tcp"),), token=FIRST.token()):
        x = torch.ones(3, device=DEVICE)
        assert x.sum().item() == 3.0
        write_keys(guarded_server.keys, SECOND)
        with pytest.raises(SessionLost, match="revoked or has expired"):
            wait_for(lambda: (x + 1).sum().item() is None, "the end of the session")
    assert [line["why"] for line in guarded_server.audit if line["audit"] == "evicted"] == ["revoked or expired"]
    with configured(servers=(guarded_server.server.url("tcp"),), token=SECOND.token()):
        assert torch.ones(3, device=DEVICE).sum().item() == 3.0
    write_keys(guarded_server.keys, FIRST)


# --- the authenticator alone ----------------------------------------------------------------------------------------------


def test_sessions_end_when_their_token_expires(prepared_authenticator, monkeypatch):
    expires = int(time.time()) + 3600
    key = prepared_authenticator.authenticate(Credentials(FIRST.token(exp=expires))).key
    assert prepared_authenticator.is_valid(key)
    monkeypatch.setattr(module.time, "time", lambda: expires + 29.0)
    assert prepared_authenticator.is_valid(key), "clocks may differ"
    monkeypatch.setattr(module.time, "time", lambda: expires + 31.0)
    assert not prepared_authenticator.is_valid(key)


def test_missing_key_set_keeps_previous_keys(prepared_authenticator, keys, caplog):
    keys.unlink()
    for _ in range(3):
        assert isinstance(prepared_authenticator.authenticate(Credentials(FIRST.token())), Identity)
    assert caplog.text.count("The previous keys stay in use") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no JSON", "cannot be read"),
        ("[]", "has a list `keys`"),
        ('{"keys": []}', "no public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}', "no public key"),
        ('{"keys": [{"kty": "RSA", "kid": "a"}]}', "the key 'a'"),
        (json.dumps({"keys": [FIRST.public, STRANGE.public]}), "have the same `kid`"),
    ],
)
def test_server_refuses_invalid_key_set(tmp_path, content, said):
    (tmp_path / "jwks.json").write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        JwtAuthenticator(Settings(tmp_path / "jwks.json", ("djinn",))).prepare()


def test_group_writable_key_set_is_refused(keys):
    keys.chmod(0o664)
    with pytest.raises(ConfigurationError, match="chmod go-w"):
        JwtAuthenticator(Settings(keys, ("djinn",))).prepare()


def test_keys_and_audience_are_required(keys):
    for settings, said in ((Settings(), "`plugins.jwt.keys`"), (Settings(keys), "`plugins.jwt.audience`")):
        with pytest.raises(ConfigurationError, match=said):
            JwtAuthenticator(settings).prepare()
    for algorithms in (("HS256",), ("none",), ()):
        with pytest.raises(ValueError, match="must be one or more of RS256"):
            Settings(keys, ("djinn",), algorithms=algorithms)
