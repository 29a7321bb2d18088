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
