"""Create and load the self-signed TLS certificate of a server, which clients check by its fingerprint."""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
from pathlib import Path
from typing import Any, Final

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.system.private_directories import private_directory
from djinn_core.system.shared_files import replace_file
from djinn_server.system.private_files import open_private

_DAYS: Final = 825  # the longest lifetime that browsers accept
_RENEW_DAYS: Final = 30
_NAME: Final = "djinn"


@attrs.frozen
class CertificateFiles:
    """Paths of the PEM files of a certificate and its key."""

    certificate: Path
    key: Path


def self_signed(directory: Path, hosts: tuple[str, ...] = ()) -> CertificateFiles:
    """Return the certificate in `directory`. Create a certificate if there is none or if it is about to expire.

    Args:
        directory: directory for the certificate and its key, which only this user may enter.
        hosts: names and addresses of a new certificate, in addition to this machine's.

    Raises:
        ConfigurationError: the files cannot be read or written, or the library for certificates is missing.
    """
    files = CertificateFiles(directory / "certificate.pem", directory / "key.pem")
    try:
        private_directory(directory, "certificate and key")
        if not _is_usable(files):
            certificate, key = _generate(hosts)
            replace_file(files.key, key)
            replace_file(files.certificate, certificate)
    except OSError as error:
        raise ConfigurationError(f"cannot store a certificate in {directory}: {error}") from error
    return files


def _is_usable(identity: CertificateFiles) -> bool:
    if not (identity.certificate.exists() and identity.key.exists()):
        return False
    open_private(identity.key).close()
    try:
        certificate = _library().x509.load_pem_x509_certificate(identity.certificate.read_bytes())
    except ValueError:
        return False
    lifetime = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    return bool(lifetime > dt.timedelta(days=_RENEW_DAYS))


def _library() -> Any:
    try:
        import cryptography.x509
    except ImportError as error:
        raise ConfigurationError(
            "the package `cryptography`, which generates certificates, is not installed: `pip install cryptography`. Or use "
            "your own certificate with --tls-cert and --tls-key"
        ) from error
    return cryptography


def _generate(hosts: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Create a certificate and a key, and return both as PEM."""
    x509 = _library().x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    names = x509.SubjectAlternativeName([_general_name(host) for host in _hosts(hosts)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))  # clocks differ
        .not_valid_after(now + dt.timedelta(days=_DAYS))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(encoding), private


def _hosts(hosts: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(("localhost", "127.0.0.1", "::1", socket.gethostname(), *filter(None, hosts))))


def _general_name(host: str) -> Any:
    x509 = _library().x509
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host.encode("idna").decode("ascii"))
