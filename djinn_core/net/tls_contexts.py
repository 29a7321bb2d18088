"""Contexts of the standard library's `ssl` for both ends, and whose certificate a client takes."""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import ssl
from pathlib import Path
from typing import Final

from djinn_core.errors import ConfigurationError, TransportError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.net.cert_reload import CertificateRenewal

FINGERPRINT: Final = "sha256:"
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; those of 1.3 are all like that
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@functools.lru_cache(maxsize=64)
def client_context(tls: TlsOptions) -> ssl.SSLContext:
    """TLS context of a client: the server's certificate is verified, or compared with fingerprints where there are some.

    Raises:
        ConfigurationError: a file cannot be used; the message names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    if tls.fingerprints:  # compared after the handshake, in which the server proves that the certificate is its own
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif tls.authority is not None:
        _load_authority(context, tls.authority)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if tls.certificate is not None:
        _load_identity(context, tls)
    return context


def server_context(tls: TlsOptions) -> ssl.SSLContext:
    """TLS context of a server; clients must show a certificate where there is an authority for them.

    When the files of the certificate change, it shows the new one.

    Raises:
        ConfigurationError: there is no certificate, or a file cannot be used; the message names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    # Tickets for resumption would lie unread at clients that only send, and closing over unread bytes resets a connection.
    context.num_tickets = 0
    _load_identity(context, tls)
    if tls.authority is not None:
        _load_authority(context, tls.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    files = tuple(file for file in (tls.certificate, tls.key) if file is not None)
    CertificateRenewal(context, files, lambda renewed: _load_identity(renewed, tls)).start()
    return context


def fingerprint_of_file(path: Path) -> str:
    """`sha256:` and the digest of the first certificate in a PEM file, in hexadecimal.

    Raises:
        ConfigurationError: there is none in it.
    """
    try:
        found = _CERTIFICATE.search(path.read_text(encoding="ascii"))
        certificate = ssl.PEM_cert_to_DER_cert(found.group()) if found else b""
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the certificate {path}: {error}") from error
    if not certificate:
        raise ConfigurationError(f"there is no certificate in {path}: it must be PEM, -----BEGIN CERTIFICATE-----")
    return fingerprint_of(certificate)


def fingerprint_of(certificate: bytes) -> str:
    """The fingerprint of a certificate in DER."""
    return FINGERPRINT + hashlib.sha256(certificate).hexdigest()


def check_fingerprint(tls: TlsOptions, certificate: bytes | None, peer: str) -> None:
    """True if the peer's certificate (DER) is one of the expected ones, or none are expected.

    Raises:
        TransportError: it is not.
    """
    if not tls.fingerprints:
        return
    shown = fingerprint_of(certificate or b"")
    if not any(hmac.compare_digest(shown, expected) for expected in tls.fingerprints):
        raise TransportError(
            f"{peer} showed the certificate {shown}, which is not the one that was expected. If the server has a new one, "
            "copy its connection file again or change the setting tls_fingerprints; otherwise another machine is in between"
        )


def _load_identity(context: ssl.SSLContext, tls: TlsOptions) -> None:
    if tls.certificate is None:
        raise ConfigurationError("TLS needs a certificate: --tls-cert FILE and --tls-key FILE, or --tls-self-signed")
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except (OSError, ValueError) as error:
        files = f"{tls.certificate} with the key {tls.key}" if tls.key else str(tls.certificate)
        raise ConfigurationError(
            f"cannot use the certificate {files}: {error}. Both must be PEM and belong together"
        ) from error


def _no_password() -> str:
    raise ValueError("the key is protected by a passphrase, which cannot be typed here")


def _load_authority(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigurationError(f"cannot use the authority's certificate {authority}: {error}") from error
