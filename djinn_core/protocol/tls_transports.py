"""Transports under TLS, beside the plain ones that plugins register."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.hookspecs.transports import TlsOptions, Transport
from djinn_core.protocol.addresses import is_loopback, parse_url


def under_tls(transports: Iterable[Transport], tls: TlsOptions) -> tuple[Transport, ...]:
    """Of `transports` those that can move their frames under TLS, as variants that do."""
    secured = (transport.secured(tls) for transport in transports)
    return tuple(variant for variant in secured if variant is not None)


def with_tls(transports: Iterable[Transport], tls: TlsOptions) -> tuple[Transport, ...]:
    """All of `transports`, followed by the variants under TLS."""
    plain = tuple(transports)
    return (*plain, *under_tls(plain, tls))


def trusting(transports: Iterable[Transport], fingerprint: str) -> tuple[Transport, ...]:
    """The transports to an executor that has a certificate of its own with that fingerprint; empty: it has none.

    Variants that would accept another certificate are left out.
    """
    known = tuple(transports)
    if not fingerprint:
        return known
    secured = under_tls(known, TlsOptions(fingerprints=(fingerprint,)))
    schemes = {scheme for transport in secured for scheme in transport.schemes}
    return (*secured, *(transport for transport in known if schemes.isdisjoint(transport.schemes)))


def secure_schemes(transports: Iterable[Transport]) -> frozenset[str]:
    """The URL schemes of the variants under TLS."""
    return frozenset(scheme for transport in under_tls(transports, TlsOptions()) for scheme in transport.schemes)


def travels_bare(url: str, transports: Iterable[Transport]) -> bool:
    """True if frames to `url` cross a network without TLS although the transport supports TLS."""
    if "://" not in url:
        return False
    parts = parse_url(url)
    schemes = {s for t in transports if t.secured(TlsOptions()) is not None for s in t.schemes}
    return parts.scheme in schemes and not is_loopback(parts.hostname or "")
