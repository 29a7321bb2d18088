"""Over connections that the server has upgraded; those made of requests are in the conformance tests of TLS and of the proxy."""

import pytest

from djinn.testing import TransportConformance
from djinn_http import HttpTransport


class TestHttp(TransportConformance):
    stateful_examples = 6  # the thread of a listener ends a second later

    @pytest.fixture
    def transport(self):
        return HttpTransport()

    @pytest.fixture
    def listen_url(self):
        return "http://127.0.0.1:0"
