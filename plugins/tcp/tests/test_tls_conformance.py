import pytest

from djinn.testing import TlsTransportConformance
from djinn_tcp import TcpTransport


class TestTcps(TlsTransportConformance):
    @pytest.fixture
    def plain(self):
        return TcpTransport()

    @pytest.fixture
    def listen_url(self):
        return "tcps://127.0.0.1:0"
