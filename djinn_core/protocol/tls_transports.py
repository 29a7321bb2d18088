"""TLS variants of registered transports."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.hookspecs.transports import TlsOptions, Transport
from djinn_core.protocol.addresses import is_loopback, parse_url


def under_tls(transports: Iterable[Transport], tls: TlsOptions) -> tuple[Transport, ...]:
    """Return the TLS variants of the `transports` that support TLS."""
    secured = (transport.over_tls(tls) for transport in transports)
    return tuple(variant for variant in secured if variant is not None)


def with_tls(transports: Iterable[Transport], tls: TlsOptions) -> tuple[Transport, ...]:
    """Return all of `transports`, followed by their TLS variants."""
    plain = tuple(transports)
    return (*plain, *under_tls(plain, tls))


def transports_trusting(transports: Iterable[Transport], fingerprint: str) -> tuple[Transport, ...]:
    """Return the transports to an executor whose own certificate has this fingerprint.

    Variants that would accept another certificate are not returned. An empty fingerprint means that the executor has no
    certificate of its own.
    """
    trusted = tuple(transports)
    if not fingerprint:
        return trusted
    secured = under_tls(trusted, TlsOptions(fingerprints=(fingerprint,)))
    schemes = {scheme for transport in secured for scheme in transport.schemes}
    return (*secured, *(transport for transport in trusted if schemes.isdisjoint(transport.schemes)))


def secure_schemes(transports: Iterable[Transport]) -> frozenset[str]:
    """Return the URL schemes of the TLS variants."""
    return frozenset(scheme for transport in under_tls(transports, TlsOptions()) for scheme in transport.schemes)


def is_unprotected(url: str, transports: Iterable[Transport]) -> bool:
    """Return True if frames to `url` cross a network without TLS although the transport supports TLS."""
    if "://" not in url:
        return False
    parts = parse_url(url)
    schemes = {s for t in transports if t.over_tls(TlsOptions()) is not None for s in t.schemes}
    return parts.scheme in schemes and not is_loopback(parts.hostname or "")
