"""Conformance suite for transports under TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from djinn.testing.certificates import self_signed_tls
from djinn.testing.suite import missing
from djinn.testing.transports import TransportConformance
from djinn_core.hookspecs.transports import TlsOptions, Transport


class TlsTransportConformance(TransportConformance):
    """Tests that every transport with TLS must pass. Subclass this class in addition to `TransportConformance`."""

    @pytest.fixture
    def plain(self) -> Transport:
        """Return the transport without TLS. Its method `over_tls` must return the transport with TLS."""
        return missing(self, "plain", "your transport")  # type: ignore[return-value]

    @pytest.fixture
    def tls(self, tmp_path: Path) -> TlsOptions:
        """Return TLS options with a certificate, which clients trust."""
        return self_signed_tls(tmp_path)

    @pytest.fixture
    def transport(self, plain: Transport, tls: TlsOptions) -> Transport:
        """Return the transport with TLS, which is under test."""
        secured = plain.over_tls(tls)
        assert secured is not None, "`over_tls` must return the transport under TLS, and returned None: it has no TLS"
        return secured

    # Tests that TLS does not affect, and that take long.
    test_calls_in_any_order = None  # type: ignore[assignment]
    test_large_bodies = None  # type: ignore[assignment]
    test_connections_are_independent = None  # type: ignore[assignment]
    test_a_broken_connection_fails_the_sender = None  # type: ignore[assignment]
    test_close_reason_survives_a_failed_send = None  # type: ignore[assignment]
    test_small_frames_are_sent_without_a_reader = None  # type: ignore[assignment]
    test_received_buffers_keep_their_content = None  # type: ignore[assignment]
    test_close_cancels_a_send = None  # type: ignore[assignment]
    test_received_frames_respect_limits = None  # type: ignore[assignment]
    test_sent_frames_respect_limits = None  # type: ignore[assignment]
