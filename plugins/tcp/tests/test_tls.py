"""Authentication under TLS: clients that are let in, and servers that are accepted."""

import datetime as dt
import socket
import ssl

import attrs
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from djinn.errors import ConfigurationError, TransportError
from djinn.hooks import Frame, Limits, TlsOptions
from djinn_tcp import TcpTransport, transport


class Authority:
    """A certificate authority."""

    def __init__(self, folder):
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the tests")])
        self.file = self._write("authority", self._sign(self.name, self.key, "authority", ca=True))

    def issue(self, host):
        """Write a certificate and its key for a host. Return their files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        form = serialization.Encoding.PEM
        private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        certificate = self._sign(subject, key, host)
        return TlsOptions(self._write(host, certificate), self._write(f"{host}.key", private))

    def _sign(self, subject, key, host, ca=False):
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder(self.name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        if not ca:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _write(self, name, content):
        path = self.folder / f"{name}.pem"
        path.write_bytes(content)
        return path


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def listen():
    listeners = []

    def listen(tls):
        def accept(connection):
            connection.send(Frame(b"let in"))
            connection.receive(300)

        listeners.append(TcpTransport().over_tls(tls).listen("tcps://localhost:0", Limits(), accept))
        return listeners[-1].url

    yield listen
    for listener in listeners:
        listener.close()


def greeting(url, tls):
    client = TcpTransport().over_tls(tls).connect(url, Limits(), 5)
    try:
        return client.receive(300).head
    finally:
        client.close()


def test_client_checks_certificate_authority_and_name(authority, listen):
    trusting = TlsOptions(authority=authority.file)
    assert greeting(listen(authority.issue("localhost")), trusting) == b"let in"
    with pytest.raises(TransportError, match="cannot be trusted"):
        greeting(listen(authority.issue("elsewhere.example")), trusting)
    with pytest.raises(TransportError, match="tls_authority"):
        greeting(listen(authority.issue("localhost")), TlsOptions())


def test_client_certificate_is_required(authority, listen, tls):
    url = listen(attrs.evolve(authority.issue("localhost"), authority=authority.file))
    client = authority.issue("client.example")
    assert greeting(url, attrs.evolve(client, authority=authority.file)) == b"let in"
    for other in (TlsOptions(), TlsOptions(tls.certificate, tls.key)):  # none, and one that no authority vouches for
        with pytest.raises(TransportError):
            greeting(url, attrs.evolve(other, authority=authority.file))


def test_old_versions_of_tls_are_refused(tls, listen):
    host, port = listen(tls).removeprefix("tcps://").split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection((host, int(port)), 300) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)


def test_missing_tls_handshake_is_disconnected(tls, listen, monkeypatch):
    monkeypatch.setattr(transport, "_HANDSHAKE_SECONDS", 0.2)
    host, port = listen(tls).removeprefix("tcps://").split(":")
    with socket.create_connection((host, int(port)), 300) as silent:
        assert silent.recv(1) == b""


def test_invalid_certificate_error_names_file(tmp_path, tls, authority):
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no certificate")
    for wrong in (TlsOptions(nothing, tls.key), TlsOptions(tls.certificate, authority.issue("x").key), TlsOptions()):
        with pytest.raises(ConfigurationError, match=r"cannot use|needs a certificate"):
            TcpTransport().over_tls(wrong).listen("tcps://127.0.0.1:0", Limits(), lambda connection: None)
