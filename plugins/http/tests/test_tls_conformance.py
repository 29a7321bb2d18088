import pytest

from djinn.testing import TlsTransportConformance
from djinn_http import HttpTransport


class TestHttps(TlsTransportConformance):
    @pytest.fixture
    def plain(self):
        return HttpTransport()

    @pytest.fixture
    def listen_url(self):
        return "https://127.0.0.1:0"
