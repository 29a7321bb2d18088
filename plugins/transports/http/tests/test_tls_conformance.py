import pytest

from djinn.testing import TransportConformance
from djinn_http import HttpTransport


class TestHttps(TransportConformance):
    @pytest.fixture
    def transport(self, tls):
        return HttpTransport().secured(tls)

    @pytest.fixture
    def listen_url(self):
        return "https://127.0.0.1:0"

    # What TLS adds nothing to, and takes long.
    test_large_bodies = None
    test_connections_are_independent = None
    test_a_broken_connection_fails_the_sender = None
    test_the_last_words_survive_a_failed_send = None
    test_limits_hold_for_what_comes = None
    test_limits_hold_for_what_goes = None
