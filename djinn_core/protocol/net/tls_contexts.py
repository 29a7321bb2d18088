"""TLS contexts of both ends: accepted certificates of a client, and renewal of a server's certificate.

A certificate is renewed while the server runs: new connections use the new certificate, and open connections
continue.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from djinn_core.errors import ConfigurationError, TransportError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.logs import get_logger
from djinn_core.system.shared_files import FileVersion, version_of

PAUSE_SECONDS: Final = 2.0
_log = get_logger("djinn.transport")

# Loads a certificate and its key into a context. Raises `ConfigurationError` if they cannot be used.
Load = Callable[[ssl.SSLContext], None]


class CertificateRenewal:
    """Reload the certificate of a TLS context when its files change, while the context is referenced."""

    def __init__(self, context: ssl.SSLContext, files: tuple[Path, ...], load: Load) -> None:
        """Watch `files`. `load` loads the certificate into the context that it gets.

        `load` must not hold a reference to `context`.
        """
        self._context = weakref.ref(context)
        self._files = files
        self._load = load
        self._versions = _versions(files)

    def start(self) -> None:
        """Check periodically, on a thread that ends with the context."""
        threading.Thread(target=self._run, name="djinn-certificates", daemon=True).start()

    def reload_if_changed(self) -> bool:
        """Reload changed files. Return False if the context no longer exists.

        Files that cannot be used have no effect. They are tried again after their next change.
        """
        context = self._context()
        if context is None:
            return False
        now = _versions(self._files)
        if not now or now == self._versions:
            return True
        self._versions = now
        try:
            # half of a new pair must not get into the active context
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(context)
        except ConfigurationError as error:
            _log.error("a changed certificate cannot be used; the previous one stays active", error=str(error))
        else:
            _log.info("a certificate was reloaded", files=[str(file) for file in self._files])
        return True

    def _run(self) -> None:
        while self.reload_if_changed():
            time.sleep(PAUSE_SECONDS)


def _versions(files: tuple[Path, ...]) -> tuple[FileVersion, ...]:
    """Return the versions of the files; an empty tuple if a file is missing, as during a replacement."""
    try:
        return tuple([version_of(file) for file in files])
    except OSError:
        return ()


class UnexpectedCertificate(TransportError):  # noqa: N818 - says what was met
    """The certificate that the other end presents is not the expected certificate.

    Attributes:
        fingerprint: fingerprint of the presented certificate.
    """

    def __init__(self, message: str, fingerprint: str = "") -> None:
        super().__init__(message)
        self.fingerprint = fingerprint


FINGERPRINT: Final = "sha256:"
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; all ciphers of TLS 1.3 have forward secrecy
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@functools.lru_cache(maxsize=64)
def client_context(tls: TlsOptions) -> ssl.SSLContext:
    """Return the TLS context of a client. It verifies the server's certificate, or compares fingerprints if there are any.

    Raises:
        ConfigurationError: a file cannot be used; the message names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    if tls.fingerprints:  # compared after the handshake, in which the server proves that it owns the certificate
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
    """Return the TLS context of a server. If there is an authority for clients, clients must present a certificate.

    When the certificate files change, the context uses the new certificate.

    Raises:
        ConfigurationError: there is no certificate, or a file cannot be used; the message names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    # Session tickets would stay unread at clients that only send, and closing over unread bytes resets a connection.
    context.num_tickets = 0
    _load_identity(context, tls)
    if tls.authority is not None:
        _load_authority(context, tls.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    files = tuple(file for file in (tls.certificate, tls.key) if file is not None)
    CertificateRenewal(context, files, lambda renewed: _load_identity(renewed, tls)).start()
    return context


def fingerprint_of_file(path: Path) -> str:
    """Return `sha256:` and the hexadecimal digest of the first certificate in a PEM file.

    The result is cached until the file changes. A private key in the file is zeroed in memory after each read.

    Raises:
        ConfigurationError: the file has no certificate or cannot be read.
    """
    try:
        fingerprint = _fingerprint_of_version(path, version_of(path))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the certificate {path}: {error}") from error
    if not fingerprint:
        raise ConfigurationError(f"there is no certificate in {path}: it must be PEM, -----BEGIN CERTIFICATE-----")
    return fingerprint


@functools.lru_cache(maxsize=16)
def _fingerprint_of_version(path: Path, version: FileVersion) -> str:
    with path.open("rb", buffering=0) as file:
        contents = bytearray(version.size)
        try:
            file.readinto(contents)
            certificate = _CERTIFICATE.search(contents)
            return (
                fingerprint_of(ssl.PEM_cert_to_DER_cert(bytes(certificate[0]).decode("ascii"))) if certificate else ""
            )
        finally:
            contents[:] = bytes(version.size)  # a copy would leave the key in memory


def fingerprint_of(certificate: bytes) -> str:
    """Return the fingerprint of a DER certificate."""
    return FINGERPRINT + hashlib.sha256(certificate).hexdigest()


def check_fingerprint(tls: TlsOptions, certificate: bytes | None, peer: str) -> None:
    """Check that the fingerprint of the peer's certificate (DER) is accepted, if `tls` lists fingerprints.

    Raises:
        UnexpectedCertificate: the fingerprint is not in the list.
    """
    if not tls.fingerprints:
        return
    actual = fingerprint_of(certificate or b"")
    if not any(hmac.compare_digest(actual, expected) for expected in tls.fingerprints):
        raise UnexpectedCertificate(
            f"{peer} showed the certificate {actual}, and {' or '.join(tls.fingerprints)} was expected. If the server's operator says that "
            "the new one is right, `djinn login` again, copy the connection file again, or change the setting tls_fingerprints. "
            "Otherwise another machine answers in the server's place",
            actual,
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
    raise ValueError("the key is protected by a passphrase, which Djinn cannot ask for: store it without one")


def _load_authority(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigurationError(f"cannot use the authority's certificate {authority}: {error}") from error
