"""Create a TLS certificate for tests of transports."""

from __future__ import annotations

from pathlib import Path

from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.protocol.net.tls_contexts import fingerprint_of_file
from djinn_server.launch.self_signed import self_signed


def self_signed_tls(directory: Path) -> TlsOptions:
    """Create a self-signed certificate in `directory`, and return TLS options with its paths and its fingerprint."""
    identity = self_signed(directory)
    return TlsOptions(identity.certificate, identity.key, fingerprints=(fingerprint_of_file(identity.certificate),))
